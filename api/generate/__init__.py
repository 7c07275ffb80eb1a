"""Generation: from a parsed body to engine requests, and from deltas to answers and event streams."""
