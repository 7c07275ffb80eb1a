"""Models whose modules are the transformers library's: its attention interface leads to our KV pool and kernels."""
