"""Tenant threads: a thread pool of which each tenant occupies as many threads as it leaves to others."""

from __future__ import annotations

from asyncio import wrap_future
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from .tenant_slots import TenantSlots
from .thread_calls import call_on

T = TypeVar("T")


class TenantThreads:
    """Threads for calls that take long, or never end. Thread-safe.

    Args:
        count: the threads.
        most_waiting: calls that may wait, parted among tenants in the same way; 0 for no limit.

    Attributes:
        slots: one for each thread.
    """

    def __init__(self, count: int, name: str, most_waiting: int = 0) -> None:
        self.slots = TenantSlots(count, most_waiting)
        self._threads = ThreadPoolExecutor(count, name)

    def submit(self, tenant: str, call: Callable[[], T]) -> Future[T]:
        """Make a call once the tenant has a turn. Its thread counts as the tenant's until the call ends.

        The result is a ``NoThread`` where no thread can be started for it.

        Raises:
            ShareFull: the tenant has as many calls waiting as it may.
        """
        result: Future[T] = Future()
        turn = self.slots.ask(tenant)
        result.add_done_callback(lambda _: self.slots.leave(turn))
        turn.granted.add_done_callback(lambda _: call_on(self._threads, call, result))
        return result

    async def call(self, tenant: str, call: Callable[[], T]) -> T:
        """Return what a call does, made as by ``submit`` with the context variables of this task.

        Raises:
            ShareFull: the tenant has as many calls waiting as it may.
            NoThread: no thread can be started for it.
        """
        return await wrap_future(self.submit(tenant, partial(copy_context().run, call)))

    def shutdown(self) -> None:
        """Wait for the calls that run; those that wait are never made."""
        self._threads.shutdown(wait=True, cancel_futures=True)
