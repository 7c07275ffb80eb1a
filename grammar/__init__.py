"""Grammars: what a structured answer may look like, compiled to masks over the vocabulary."""
