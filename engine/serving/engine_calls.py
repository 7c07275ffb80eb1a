"""Calls to the engine that wait for their answer, and which adapters there are by what it says of itself."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from ..errors import EngineDead
from ..messages import (
    AdapterChanged,
    Adapters,
    ListAdapters,
    LoadAdapter,
    Message,
    Reply,
    SnapshotTaken,
    TakeSnapshot,
    UnloadAdapter,
)
from ..snapshot import EngineSnapshot
from ..types import AdapterInfo
from .output_processor import error_of

Call = LoadAdapter | UnloadAdapter | ListAdapters | TakeSnapshot
Answer = Reply | Adapters | SnapshotTaken
_MINE = (AdapterChanged, Reply, Adapters, SnapshotTaken)


class EngineCalls:
    """Belongs to the client's event loop.

    Args:
        send: hands messages to the engine; EngineDead if there is none.

    Attributes:
        names: what each name stands for, as of its last change: tier and counts are those of that moment.
    """

    def __init__(self, send: Callable[[Sequence[Message]], None]) -> None:
        self.names: dict[str, AdapterInfo] = {}
        self._send = send
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[Answer]] = {}

    async def load(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load an adapter. Raises RequestError if it cannot be, EngineDead if the engine is gone before the answer."""
        await self._call(LoadAdapter(next(self._ids), name, path, replace))

    async def unload(self, name: str) -> None:
        """Unload an adapter. Raises UnknownModel if there is none of that name, else as for ``load``."""
        await self._call(UnloadAdapter(next(self._ids), name))

    async def tell(self) -> tuple[AdapterInfo, ...]:
        """All adapters as they stand now."""
        answer = await self._call(ListAdapters(next(self._ids)))
        return answer.adapters if isinstance(answer, Adapters) else ()

    async def take_snapshot(self) -> EngineSnapshot:
        """The engine as it stands between two steps. Raises EngineDead if it is gone before the answer."""
        answer = await self._call(TakeSnapshot(next(self._ids)))
        assert isinstance(answer, SnapshotTaken)
        return answer.snapshot

    def take(self, messages: list[Message]) -> list[Message]:
        """Take answers, and what a frame says of adapters. Returns the other messages."""
        if not any(isinstance(message, _MINE) for message in messages):
            return messages
        for message in messages:
            if isinstance(message, AdapterChanged):
                self._change(message)
            elif isinstance(message, (Reply, Adapters, SnapshotTaken)):
                self._answer(message)
        return [message for message in messages if not isinstance(message, _MINE)]

    def fail(self, error: EngineDead) -> None:
        """The engine is gone: no call is answered any more."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)
        self._open.clear()

    def _change(self, message: AdapterChanged) -> None:
        if message.info is None:
            self.names.pop(message.name, None)
        else:
            self.names[message.name] = message.info

    def _answer(self, message: Answer) -> None:
        """Wake who waits for an answer, if somebody still does."""
        future = self._open.get(message.id)
        if future is not None and not future.done():
            future.set_result(message)

    async def _call(self, call: Call) -> Answer:
        self._send([call])
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[call.id] = future
        try:
            answer = await future
        finally:
            self._open.pop(call.id, None)
        if isinstance(answer, Reply) and answer.failure is not None:
            raise error_of(answer.failure)
        return answer
