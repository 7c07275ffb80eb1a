"""Socket scope: names by which routes recognize the requests of a WebSocket connection."""

from __future__ import annotations

INNER_APP = "inner_app"
"""Key in the state of a WebSocket's scope.

Its value is the ASGI app that handles the connection's requests, if not the main one.
"""
CONNECTION_HEADER = "x-rootgraft-connection"
"""Header of the requests of one connection. They may continue responses of the same connection that are not stored."""
