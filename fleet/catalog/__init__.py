"""Model catalogue: names, their versions by content digest, and the weights by which requests are spread over them."""
