"""Tools for the files of a model: the plan of its weights (`rootgraft doctor MODEL`), and `rootgraft quantize`."""
