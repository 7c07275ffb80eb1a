"""Fleet: one engine of many replicas, which routes sequences by prefix and replays those of a lost replica.

Also the catalogue of the adapter versions that an engine serves.
"""
