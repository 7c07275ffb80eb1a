"""Models: one decoder, families as data."""
