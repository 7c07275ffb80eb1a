"""What the requests of a WebSocket connection are known by to the routes that answer them."""

from __future__ import annotations

INNER_APP = "inner_app"
"""Key in the state of a WebSocket's scope for what answers its requests, where that is not the application."""
CONNECTION_HEADER = "x-rootgraft-connection"
"""Header of the requests of one connection, which may go on from responses of its own that are not stored."""
