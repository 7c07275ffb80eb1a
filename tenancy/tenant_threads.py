"""Tenant threads: a thread pool of which each tenant occupies as many threads as it leaves to others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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

    def shutdown(self) -> None:
        """Wait for the calls that run; those that wait are never made."""
        self._threads.shutdown(wait=True, cancel_futures=True)
