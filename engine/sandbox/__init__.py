"""Worker processes that run programs of clients and publishers: chat templates, tokenizers, validators."""
