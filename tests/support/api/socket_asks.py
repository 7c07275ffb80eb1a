"""A WebSocket client of another project, against a server of a test."""

from __future__ import annotations

import json
from typing import Any

from websockets.sync.client import ClientConnection, connect

from support.api.api_live import Live
from support.machine.waits import HANG_SECONDS


def socket_of(live: Live, path: str, key: str = "none", **options: Any) -> ClientConnection:
    """Open a WebSocket; use it in a ``with``."""
    return connect_to(live.url, path, key, **options)


def connect_to(url: str, path: str, key: str = "none", **options: Any) -> ClientConnection:
    """Open a WebSocket of a server at an HTTP address, which is never given up for its slowness."""
    headers = {"Authorization": f"Bearer {key}", **options.pop("headers", {})}
    url = url.replace("http://", "ws://") + path
    patience = {"open_timeout": HANG_SECONDS, "close_timeout": HANG_SECONDS, "ping_interval": None}
    # Where its own queue has a bound and is full, the client waits for room in it even to close the connection.
    patience["max_queue"] = None
    return connect(url, additional_headers=headers, proxy=None, **{**patience, **options})


def tell(socket: ClientConnection, message: Any) -> None:
    socket.send(message if isinstance(message, str | bytes) else json.dumps(message))


def hear(socket: ClientConnection) -> dict[str, Any]:
    return json.loads(socket.recv(timeout=HANG_SECONDS))  # type: ignore[no-any-return]


def hear_ends(socket: ClientConnection, count: int, ends: tuple[str, ...] = ("done", "error")) -> list[dict[str, Any]]:
    """Return the messages up to the last one of so many requests."""
    found: list[dict[str, Any]] = []
    while sum(each["type"] in ends for each in found) < count:
        found.append(hear(socket))
    return found
