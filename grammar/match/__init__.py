"""Matching while an answer is generated: matcher, bitmasks, backends, and ends that fit in the token budget."""
