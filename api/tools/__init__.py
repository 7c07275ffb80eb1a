"""Tool calls: how each family of models writes them, the grammar that makes them valid, and their way back out."""
