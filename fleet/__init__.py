"""Fleet: one engine of many replicas, which routes sequences by prefix and replays the sequences of a lost replica.

The package also contains the catalogue of the adapter versions that an engine serves.
"""
