"""Whole server processes, and machines made of files, for the tests of operation."""
