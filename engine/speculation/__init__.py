"""Speculative decoding without a draft model: proposers, prompt lookup, output lookup. No torch."""
