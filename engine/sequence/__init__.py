"""Sequences: the state of one stream of tokens, and the check that stops it. No torch."""
