"""Grammar text for the backends, from constraints, plain grammars and structural tags."""
