"""Engine loop: an event loop on a separate thread, which runs an engine's client independently of the caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class EngineLoop:
    """Runs calls and coroutines on an event loop of its own thread, until ``close``."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # The thread is a daemon. Otherwise an engine that is never shut down would keep the process alive.
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True)
        self._thread.start()

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        """Schedule a call on the loop. Calls run in the order of posting. Calls to a closed loop are dropped."""
        # The loop may be closed between a check and the call.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the loop's own thread."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and return its result or raise its error.

        Blocks; not for the loop's own thread.
        """
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop, and return its result. The caller's loop is not blocked."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """End the thread and close the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
