"""Calls on the threads of a pool that may start none: the failure is the call's result."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

T = TypeVar("T")


class NoThread(Exception):
    """The system starts no thread for a call, for want of memory or of processes, or the pool is shut down."""


def call_on(pool: ThreadPoolExecutor, call: Callable[[], T], result: Future[T] | None = None) -> Future[T]:
    """Make a call on a thread of a pool. Returns its result, a ``NoThread`` where the pool has and starts no thread.

    ``ThreadPoolExecutor.submit`` raises then, and keeps the call all the same for a thread that comes later.

    Args:
        result: the future to use; None for a new one.
    """
    made: Future[T] = Future() if result is None else result
    # Whoever is first takes the lock: the thread that makes the call, or the failure to start one.
    taken = Lock()

    def make() -> None:
        if taken.acquire(blocking=False) and made.set_running_or_notify_cancel():
            try:
                value = call()
            except BaseException as error:
                made.set_exception(error)
            else:
                made.set_result(value)

    try:
        pool.submit(make)
    except RuntimeError as error:
        if taken.acquire(blocking=False) and made.set_running_or_notify_cancel():
            made.set_exception(NoThread(str(error)))
    return made
