"""Engine thread: runs the calls to an engine one after the other on a thread that no signal can interrupt."""

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
    """Runs calls on one thread, in the order in which they arrive.

    Python raises KeyboardInterrupt and the exceptions of signal handlers only in the main thread, but there between any
    two operations. So an interrupt never leaves a call on this thread half done; it only ends the main thread's wait
    for the call.
    """

    def __init__(self) -> None:
        self._jobs: _Jobs = SimpleQueue()
        # The thread is a daemon, because it waits for calls without end. When the interpreter exits, a running call is
        # awaited.
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="engine", daemon=True)
        self._thread.start()
        self._process = os.getpid()
        self._end = weakref.finalize(self, _end, self._jobs, self._thread)

    @property
    def is_here(self) -> bool:
        """Whether the thread runs in this process, and not in a parent process from which this process was forked."""
        return os.getpid() == self._process

    def run(self, call: Callable[[], T]) -> T:
        """Run a call on the thread, and return its result or raise its error.

        If the wait is interrupted, the call still runs, before all later calls.

        Raises:
            EngineDead: this process is a fork of the process in which the thread runs.
            RuntimeError: the thread was closed.
        """
        if not self.is_here:
            raise EngineDead(
                f"The engine of this LLM runs in process {self._process}, and process {os.getpid()} was forked from "
                "it: create another LLM after the fork, or start processes with multiprocessing's method spawn."
            )
        if not self._end.alive:
            raise RuntimeError("the engine thread is closed")
        outcome: Future[T] = Future()
        done: SimpleQueue[None] = SimpleQueue()

        def job() -> None:
            try:
                outcome.set_result(call())
            except BaseException as error:
                # Every error is passed to the caller.
                outcome.set_exception(error)
            done.put(None)

        self._jobs.put(job)
        # ``get`` is written in C. So, unlike in ``Future.result``, an interrupt cannot leave its lock in a broken
        # state.
        done.get()
        return outcome.result()

    def close(self) -> None:
        """End the thread after the calls that were given so far."""
        self._end()


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        # The job refers to the engine. Without this line it would keep the engine alive while the thread waits.
        del job


def _end(jobs: _Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()
