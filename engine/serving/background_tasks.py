"""Background tasks: asyncio tasks that nobody awaits, referenced here so that they are not garbage-collected."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any


class BackgroundTasks:
    """Set of running background tasks. A task that ends is removed. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(tuple(self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, job: Coroutine[Any, Any, None]) -> None:
        """Run ``job`` as a task."""
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self:
            task.cancel()

    async def wait(self) -> None:
        """Wait until all tasks have ended, with or without an exception."""
        await asyncio.gather(*self, return_exceptions=True)
