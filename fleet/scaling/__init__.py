"""Scaling: how many replicas there should be."""
