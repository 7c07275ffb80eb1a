"""One look at the engine for all who watch: it is disturbed seldom, however many there are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import orjson

from ...engine.errors import CapacityError

if TYPE_CHECKING:
    from ...engine.serving.engine_client import EngineClient

LEAST_SECONDS = 0.5
"""Time between two snapshots, at least."""
PATIENCE = 3.0
"""Seconds that a long step may keep somebody waiting, before the snapshot of before is shown once more."""


class EngineWatch:
    """Snapshots of the engine as JSON, each shared by all that ask while it is new. Belongs to one event loop.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked = float("-inf")
        self._taking: asyncio.Task[bytes] | None = None
        self._latest: bytes | None = None

    async def snapshot(self, client: EngineClient) -> bytes:
        """The snapshot of now, or of ``LEAST_SECONDS`` ago.

        Raises:
            EngineDead: the engine is gone.
            CapacityError: it has never answered, and does not do so in time.
        """
        if self._taking is None or (self._taking.done() and self._clock() >= self._asked + LEAST_SECONDS):
            self._asked = self._clock()
            self._taking = asyncio.create_task(self._take(client))
        taking = self._taking
        await asyncio.wait((taking,), timeout=PATIENCE)
        if taking.done():
            return taking.result()
        if self._latest is None:
            raise CapacityError(f"The engine is in a step of more than {PATIENCE:g} seconds.")
        return self._latest

    async def _take(self, client: EngineClient) -> bytes:
        self._latest = orjson.dumps(await client.take_snapshot())
        return self._latest
