"""Matching at run time: matcher, bitmasks, backends, closing within the token budget."""
