"""Gateways: processes that answer HTTP on one port, and use the engine, limits and stores of one main process.

Modules ``gateway_*`` run in a gateway, modules ``main_*`` in the main process; the others run in both.
"""
