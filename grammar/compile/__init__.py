"""Compiling grammars: in this process, or in a pool of worker processes with limits."""
