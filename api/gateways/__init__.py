"""Gateways: processes that answer HTTP on one port, and use the engine, limits and stores of one main process.

Modules ``gateway_*`` run in a gateway, and modules ``main_*`` run in the main process. The others run in both.
"""
