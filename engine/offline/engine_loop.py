"""Engine loop: an event loop on a thread of its own, on which an engine's client works beside the caller's loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class EngineLoop:
    """Runs calls and coroutines on its own thread, until ``close``."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: an engine that nobody has shut down keeps no process from ending.
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True)
        self._thread.start()

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        """Have a call made, after those that were posted before. Calls of a closed loop are left out."""
        # It may be closed between a question and the call.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the loop's own."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return or raise what a coroutine does. Blocks the calling thread, which must not be the loop's own."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return or raise what a coroutine does there, while the caller's loop goes on."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """End the thread and close the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
