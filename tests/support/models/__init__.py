"""Tiny models, adapters and tokenizers in the formats that are loaded."""
