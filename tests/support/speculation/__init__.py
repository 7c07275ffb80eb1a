"""Engines with drafts and without on the same real model, and checkpoints with MTP modules."""
