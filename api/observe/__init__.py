"""Observability: log, metrics, tracing, request timers, usage ledger, and the data of the live page."""
