"""Sequences: state, stop check and guarded grammar matcher of one stream of tokens. No torch."""
