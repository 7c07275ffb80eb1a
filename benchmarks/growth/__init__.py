"""Growth curves: how times grow with context, batch, adapters, schemas, the tree and connections."""
