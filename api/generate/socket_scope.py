"""Names by which the routes recognize the requests of a WebSocket connection."""

from __future__ import annotations

INNER_APP = "inner_app"
"""Key in the state of a WebSocket's scope for the app that answers its requests, if it is not the application."""
CONNECTION_HEADER = "x-rootgraft-connection"
"""Header of the requests of one connection. They may continue responses of that connection that are not stored."""
