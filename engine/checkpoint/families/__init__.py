"""Model families as data: the fields in which they differ, and one row for each family."""
