"""Batches: files of requests answered in the background, for clients or for the command line."""
