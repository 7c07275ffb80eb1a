"""Adapters from other places: sources and their allow-list, checked downloads, the cache on disk. No torch."""
