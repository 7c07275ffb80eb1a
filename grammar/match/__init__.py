"""Following a grammar along an answer: matcher, bitmasks, backends, the close within the budget."""
