"""Engine loop: an event loop on a separate thread, on which an engine's client runs beside the caller's loop."""

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
        # The thread is a daemon, so that an engine that nobody shuts down does not keep the process alive.
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True)
        self._thread.start()

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        """Schedule a call after all calls posted before. Calls to a closed loop are dropped."""
        # The loop may be closed between the check and the call.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the loop's own."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result or raise its error. Blocks; must not be called on the loop's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop and return its result, without blocking the caller's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """End the thread and close the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
