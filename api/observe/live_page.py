"""Live page: its static files with their security headers, and a cache of engine snapshots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from ...engine.errors import CapacityError

if TYPE_CHECKING:
    from ...engine.serving.engine_like import EngineLike

_FOLDER = Path(__file__).parents[1] / "ui"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}

INDEX: Final = "index.html"
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": "; ".join(f"{kind} {source}" for kind, source in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""The page may load only its own files, may not be in a frame, and gives pages of other origins no reference to it."""

FILES: Final[Mapping[str, bytes]] = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir())}
"""The content of all files by name."""

PATHS: Final = frozenset({"/", "/ui", "/ui/", *(f"/ui/{name}" for name in FILES if name != INDEX)})
"""Paths of the files, and the root, which redirects to them.

The files contain no data, so they need no key. Their data comes from ``/ui/state``, which needs a key.
"""


def content_type(name: str) -> str:
    return _TYPES[Path(name).suffix]


LEAST_SECONDS = 0.5
"""Shortest time in seconds between two snapshots."""
PATIENCE = 3.0
"""Longest time in seconds to wait for a snapshot during a long step. Afterwards the previous snapshot is returned."""


class EngineWatch:
    """Takes snapshots of the engine as JSON, which concurrent requests share. Belongs to one event loop.

    Args:
        clock: returns monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requested_at = float("-inf")
        self._taking: asyncio.Task[bytes] | None = None
        self._latest: bytes | None = None

    async def snapshot(self, client: EngineLike) -> bytes:
        """Return a snapshot at most ``LEAST_SECONDS`` old, or the previous one during a long step.

        Raises:
            EngineDead: the engine is gone.
            CapacityError: there is no previous snapshot, and the engine sends none within ``PATIENCE`` seconds.
        """
        if self._taking is None or (self._taking.done() and self._clock() >= self._requested_at + LEAST_SECONDS):
            self._requested_at = self._clock()
            self._taking = asyncio.create_task(self._take(client))
        taking = self._taking
        await asyncio.wait((taking,), timeout=PATIENCE)
        if taking.done():
            return taking.result()
        if self._latest is None:
            raise CapacityError(f"The engine's current step has taken more than {PATIENCE:g} seconds.")
        return self._latest

    async def _take(self, client: EngineLike) -> bytes:
        self._latest = orjson.dumps(await client.take_snapshot())
        return self._latest
