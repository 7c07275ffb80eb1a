"""Fleet: one engine of many replicas, which routes sequences by prefix and replays those of a lost replica."""
