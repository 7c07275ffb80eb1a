"""Sequences: the state, the stop check and the guarded grammar matcher of one stream of tokens. No torch."""
