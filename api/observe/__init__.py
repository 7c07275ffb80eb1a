"""Observability: log, metrics, tracing, request timers, usage ledger, the live page's data."""
