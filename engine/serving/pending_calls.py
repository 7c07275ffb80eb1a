"""Pending calls: calls to the engine that wait for their replies. A reply has the id of its call."""

from __future__ import annotations

import asyncio
import itertools

from ..errors import EngineDead
from ..messages import Adapters, Reply, SessionReply, SnapshotTaken
from .output_processor import error_of

CallReply = Reply | Adapters | SnapshotTaken | SessionReply
REPLIES = (Reply, Adapters, SnapshotTaken, SessionReply)


class PendingCalls:
    """The calls that have no reply yet. Belongs to one event loop."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[CallReply]] = {}

    def new_id(self) -> int:
        return next(self._ids)

    async def reply_to(self, call: int) -> CallReply:
        """Wait for the reply to a call that was sent. Raises the error in the reply, or the error given to ``fail``."""
        future: asyncio.Future[CallReply] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            reply = await future
        finally:
            self._calls.pop(call, None)
        if isinstance(reply, Reply) and reply.failure is not None:
            raise error_of(reply.failure)
        return reply

    def answer(self, reply: CallReply) -> None:
        """Pass a reply to the call that waits for it. If no call waits for the reply any more, the reply is dropped."""
        future = self._calls.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail(self, death: EngineDead) -> None:
        """End all calls with the error ``death``."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(death)
        self._calls.clear()
