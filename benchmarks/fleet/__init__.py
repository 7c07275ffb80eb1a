"""Proofs of the fleet: simulations on a fake clock, and what routing costs."""
