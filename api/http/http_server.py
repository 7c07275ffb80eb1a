"""HTTP server: uvicorn with our protocol on an open socket, without signal handlers of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from .connection import MAX_MESSAGE_BYTES, uvicorn_options
from .tls import RenewableContext

FLUSH_SECONDS = 2
"""For answers to be sent to their ends, once the server is told to end."""


class HttpServer(uvicorn.Server):
    """uvicorn that leaves signals to its process.

    Args:
        tls: None for plain HTTP.
        max_message_bytes: of a WebSocket's messages.
    """

    def __init__(self, app: ASGIApp, tls: RenewableContext | None, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        settings = uvicorn.Config(app, **uvicorn_options(max_message_bytes), timeout_graceful_shutdown=FLUSH_SECONDS)
        settings.load()
        settings.ssl = tls
        super().__init__(settings)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
