"""Models of the sizes that people use, with random weights: their files, and steps against the machine's limits."""
