"""Background tasks: asyncio tasks that nobody awaits while they run, held so that they are not collected."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class BackgroundTasks:
    """Tasks that run; one that ends is forgotten. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, job: Coroutine[Any, Any, None]) -> None:
        """Let a job run as a task."""
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Cancel all of them."""
        for task in tuple(self._tasks):
            task.cancel()

    async def wait(self) -> None:
        """Wait for all of them, whatever they end in."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
