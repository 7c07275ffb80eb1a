"""Radix prefix tree with namespaces, soft pins and tenant-fair eviction.

It imports neither torch nor other packages of ours.
"""
