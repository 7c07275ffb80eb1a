"""Engine thread: runs the calls to an engine one after the other, where no signal interrupts them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from ..errors import EngineDead

T = TypeVar("T")
_Jobs = SimpleQueue[Callable[[], None] | None]


class EngineThread:
    """Runs calls in the order in which they were given, on one thread.

    Python raises KeyboardInterrupt, and whatever else a signal handler raises, in the main thread alone, and there
    between any two operations. A call that runs here is never left half done: only the wait for it is interrupted.
    """

    def __init__(self) -> None:
        self._jobs: _Jobs = SimpleQueue()
        # A daemon, as it waits for calls for ever; at the interpreter's exit the call that runs is waited for.
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="engine", daemon=True)
        self._thread.start()
        self._process = os.getpid()
        self._end = weakref.finalize(self, _end, self._jobs, self._thread)

    @property
    def is_here(self) -> bool:
        """Whether the thread is in this process, and not in the one that this was forked from: threads do not fork."""
        return os.getpid() == self._process

    def run(self, call: Callable[[], T]) -> T:
        """Return or raise what a call does. If the wait is interrupted, the call is still made, before all later ones.

        Raises:
            EngineDead: this process is a fork of the one that has the thread.
            RuntimeError: the thread was closed.
        """
        if not self.is_here:
            raise EngineDead(
                f"The engine of this LLM runs in process {self._process}, which process {os.getpid()} was forked from: "
                "make another LLM after the fork, or start processes by multiprocessing's method spawn."
            )
        if not self._end.alive:
            raise RuntimeError("the engine thread is closed")
        outcome: Future[T] = Future()
        done: SimpleQueue[None] = SimpleQueue()

        def job() -> None:
            try:
                outcome.set_result(call())
            except BaseException as error:
                # Every error is handed to the caller.
                outcome.set_exception(error)
            done.put(None)

        self._jobs.put(job)
        # ``get`` is written in C, unlike ``Future.result``: an interrupt leaves its lock in order.
        done.get()
        return outcome.result()

    def close(self) -> None:
        """End the thread after the calls given so far."""
        self._end()


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        # The job refers to the engine and would keep it alive while this thread waits for the next one.
        del job


def _end(jobs: _Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()
