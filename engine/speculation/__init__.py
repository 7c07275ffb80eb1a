"""Speculative decoding without a draft model: grammars, radix tree, prompt lookup, suffix decoding. No torch."""
