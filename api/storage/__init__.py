"""Stores of clients' objects: files, batches, responses."""
