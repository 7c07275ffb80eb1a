"""Model catalogue: names, their versions by content digest, and the weights that spread requests over versions."""
