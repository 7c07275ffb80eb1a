"""Checkpoints: locating them, reading GGUF headers and configurations, model families as data. No torch."""
