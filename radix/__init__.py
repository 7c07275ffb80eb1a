"""A radix tree of token prefixes. Imports nothing of ours; no torch."""
