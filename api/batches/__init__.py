"""Batch API: files of requests that are answered in the background, by the server or by ``rootgraft run-batch``."""
