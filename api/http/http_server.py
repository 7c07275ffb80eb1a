"""HTTP server: uvicorn with this package's protocol classes on an open socket, without signal handlers; runs gRPC."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from ..generate.server_state import ServerState
from .connection import MAX_MESSAGE_BYTES, uvicorn_options
from .grpc_door import open_rpc
from .tls import RenewableContext

logger = logging.getLogger("rootgraft.server")

FLUSH_SECONDS = 2
"""Seconds for the transmission of remaining response data after the server was told to end."""


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves the handling of signals to its process.

    Args:
        tls: TLS context; None for plain HTTP.
        state: state of a server that may also offer gRPC; None for a server that does not.
        max_message_bytes: largest size of a WebSocket message.

    Raises:
        ConfigError: raised by ``open_rpc``.
    """

    def __init__(
        self,
        app: ASGIApp,
        tls: RenewableContext | None,
        state: ServerState | None = None,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        settings = uvicorn.Config(app, **uvicorn_options(max_message_bytes), timeout_graceful_shutdown=FLUSH_SECONDS)
        settings.load()
        settings.ssl = tls
        super().__init__(settings)
        self._rpc = None if state is None else open_rpc(app, state)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve HTTP, and gRPC if it is configured, until ``should_exit`` is set."""
        if self._rpc is None:
            await super().serve(sockets)
            return
        await self._rpc.start()
        logger.info("gRPC on port %d", self._rpc.port)
        try:
            await super().serve(sockets)
        finally:
            await self._rpc.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
