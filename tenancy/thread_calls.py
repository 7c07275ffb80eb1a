"""Calls on the threads of a pool that may start none: the failure is the call's result."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

T = TypeVar("T")


class NoThread(Exception):
    """No thread can be started for a call: memory or processes are used up, or the pool is shut down."""


def call_on(pool: ThreadPoolExecutor, call: Callable[[], T], result: Future[T] | None = None) -> Future[T]:
    """Make a call on a thread of a pool, and return the future of its result.

    If the pool has no free thread and cannot start one, the future raises ``NoThread``. In this case
    ``ThreadPoolExecutor.submit`` itself raises an error, but it keeps the call in its queue, so a thread that is
    started later could still make it; this function prevents that.

    Args:
        result: the future to use; None for a new one.
    """
    made: Future[T] = Future() if result is None else result
    # The lock is taken once: either by the thread that makes the call, or when starting a thread has failed.
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
