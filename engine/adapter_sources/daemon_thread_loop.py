"""Event loop that runs blocking calls on daemon threads: neither the end of a task nor the process waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class DaemonThreadLoop(asyncio.SelectorEventLoop):
    """Event loop that runs each blocking call (``asyncio.to_thread``, look-ups of names) on a new daemon thread.

    asyncio's own loops wait at their end for the threads of their executor, regardless of how long a call takes.
    """

    def run_in_executor(  # type: ignore[override]  # a Future of asyncio in every case
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a call on a new daemon thread, or in an executor if one is given."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        result: Future[Any] = Future()
        result.set_running_or_notify_cancel()
        threading.Thread(target=settle, args=(result, func, *args), name="adapter-call", daemon=True).start()
        return asyncio.wrap_future(result, loop=self)


def settle(result: Future[Any], call: Callable[..., Any], *arguments: Any) -> None:
    """Run a call and put its result or exception into a future that is marked as running."""
    try:
        value = call(*arguments)
    except BaseException as error:
        # An executor's thread also passes on SystemExit and KeyboardInterrupt.
        result.set_exception(error)
    else:
        result.set_result(value)
