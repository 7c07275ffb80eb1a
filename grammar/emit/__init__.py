"""Grammars for the backends: constraints, plain grammars and structural tags written as text."""
