"""Placement: which replica a sequence is sent to. Pure decisions from the gateway's data."""
