"""Gateways: processes that answer HTTP on one port, and share engine, limits and stores of one main process."""
