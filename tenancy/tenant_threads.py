"""Tenant threads: a thread pool in which a tenant occupies at most as many threads as it leaves free for others."""

from __future__ import annotations

from asyncio import CancelledError, wrap_future
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
        count: number of threads.
        name: prefix of the threads' names.
        most_waiting: number of calls that may wait; tenants share it by the same rule as the threads. 0 for no limit.

        Attributes:
        slots: the tenants' turns, with one slot for each thread.
    """

    def __init__(self, count: int, name: str, most_waiting: int = 0) -> None:
        self.slots = TenantSlots(count, most_waiting)
        self._threads = ThreadPoolExecutor(count, name)

    def submit(self, tenant: str, call: Callable[[], T]) -> Future[T]:
        """Make a call on a thread as soon as the tenant has a turn, and return the future of its result.

        The tenant occupies the thread until the call ends. If no thread can be started, the future raises ``NoThread``.

        Raises:
            ShareFull: the tenant already has as many waiting calls as it may have.
        """
        result: Future[T] = Future()
        turn = self.slots.ask(tenant)
        result.add_done_callback(lambda _: self.slots.leave(turn))
        turn.granted.add_done_callback(lambda _: call_on(self._threads, call, result))
        return result

    async def call(self, tenant: str, call: Callable[[], T], discard: Callable[[T], object] | None = None) -> T:
        """Make a call as ``submit`` does, with the context variables of this task, and return its result.

        Args:
            discard: called with the result if this task was cancelled while the call ran, on whichever thread. A call
                that opens something needs it, as nobody else gets the result.

        Raises:
            ShareFull: the tenant already has as many waiting calls as it may have.
            NoThread: no thread can be started for the call.
        """
        result = self.submit(tenant, partial(copy_context().run, call))
        try:
            return await wrap_future(result)
        except CancelledError:
            if discard is not None:
                result.add_done_callback(partial(_discard, discard))
            raise

    def shutdown(self) -> None:
        """Wait for the calls that run; those that wait are never made."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _discard(discard: Callable[[T], object], result: Future[T]) -> None:
    if not result.cancelled() and result.exception() is None:
        discard(result.result())
