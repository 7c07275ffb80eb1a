"""Radix prefix tree with namespaces, soft pins and tenant-fair eviction. Imports nothing of ours; no torch."""
