"""Replicas on Ray: Ray places them on one machine or many, and each has its own connections to the gateway."""
