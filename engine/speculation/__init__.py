"""Speculative decoding: drafts of lookups and of a draft model or head, and which of them pay. No torch."""
