"""Socket requests: runs the tasks that answer a connection's messages, limits them, and finally cancels them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from .socket_channel import BadMessage, SocketChannel

logger = logging.getLogger("rootgraft.sockets")


class SocketRequests:
    """Runs the requests of one connection while further messages are read.

    Args:
        most: largest number of requests that may run or wait at one time.
    """

    def __init__(self, channel: SocketChannel, most: int) -> None:
        self._channel = channel
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()

    def check_room(self, request_id: str = "") -> None:
        """Raise BadMessage if no further request may be started."""
        if len(self._tasks) >= self._most:
            text = f"{self._most} requests of this connection are already running or waiting."
            raise BadMessage(text, code="rate_limit_exceeded", request_id=request_id)

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the work of a request."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def run(
        self, take: Callable[[dict[str, Any]], None], refuse: Callable[[BadMessage], Coroutine[Any, Any, None]]
    ) -> None:
        """Read messages until the client leaves or stops reading, then cancel the running requests."""
        reader = asyncio.create_task(self._read(take, refuse))
        gone = asyncio.create_task(self._channel.gone.wait())
        try:
            await asyncio.wait((reader, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._channel.gone.set()
            tasks = [reader, gone, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._channel.send_close()

    async def _read(
        self, take: Callable[[dict[str, Any]], None], refuse: Callable[[BadMessage], Coroutine[Any, Any, None]]
    ) -> None:
        async with contextlib.aclosing(self._channel.messages()) as messages:
            async for message in messages:
                try:
                    if isinstance(message, BadMessage):
                        raise message
                    take(message)
                except BadMessage as error:
                    await refuse(error)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request over a WebSocket failed", exc_info=error)
            self._channel.close(1011, "Internal server error.")
