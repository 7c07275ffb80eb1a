"""Placement: which replica a sequence goes to. Pure decisions on what the gateway knows."""
