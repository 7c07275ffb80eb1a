"""Models whose modules are the transformers library's; its attention interface calls our KV pool and kernels."""
