"""Batch API: files of requests answered in the background, by the server or by ``rootgraft run-batch``."""
