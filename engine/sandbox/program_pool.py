"""Program pool: runs untrusted programs in worker processes, each with a deadline that ends it.

A thread cannot be stopped, and native code may hold the interpreter's lock, so whatever a client or a publisher brings
as data and this server runs is run in a process that can be killed. The processes are shared by the whole process, are
started when the first job comes, and are kept.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock
from typing import Any, TypeVar

from ...grammar.compile.compile_worker import DONE
from ...grammar.compile.worker_handle import WorkerDied, WorkerProcess, WorkerTimeout
from ...grammar.compile.worker_pool import WorkerPool
from .program_worker import encode_job

TEMPLATE_SECONDS = 2.0
"""Processor time of one render of a chat template."""
TOKENIZER_SECONDS = 5.0
"""Of one text that a tokenizer encodes, and of building it."""
VALIDATION_SECONDS = 2.0
"""Of one answer's validation."""
MEMORY_BYTES = 512 << 20
"""Address space that one job may add."""
MOST_WORKERS = min(4, os.cpu_count() or 1)
_MOST_THREADS = 32  # that wait for processes, or for their turn
_MAIN = "from rootgraft.engine.sandbox.program_worker import main; main()"


T = TypeVar("T")


class ProgramRefused(Exception):
    """A program fails, or was ended at a limit. The text goes on after the program's name."""


class ProgramFailed(ProgramRefused):
    """The function that runs a program refuses it. The text is the whole of its error's."""


class ProgramStopped(ProgramRefused):
    """A program was ended at a limit on its time or memory."""


class ProgramPool:
    """Worker processes for programs. Thread-safe; its calls wait, so none is for an event loop's thread.

    Args:
        most: jobs at a time.
    """

    def __init__(self, most: int = MOST_WORKERS) -> None:
        self._most = most
        self._lock = Lock()
        self._workers: WorkerPool[WorkerProcess] | None = None
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "programs")

    async def off_loop(self, call: Callable[[], T]) -> T:
        """Await a call that may run programs, made on a thread of its own: no other work of the loop waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def run(self, program: str, seconds: float, arguments: Any, data: bytes = b"", *, memory: int = 0) -> bytes:
        """Return what a function makes of its arguments.

        Args:
            program: as ``module:name`` below the package.
            seconds: of processor time.
            arguments: of JSON's types.
            memory: bytes of address space in place of ``MEMORY_BYTES``.

        Raises:
            ProgramRefused: the program fails, or was ended.
        """
        num_bytes = memory or MEMORY_BYTES
        job = encode_job(program, seconds, num_bytes, arguments, data)
        workers = self._open()
        try:
            worker = workers.acquire()
        except WorkerDied:
            raise ProgramRefused("cannot be run: no process for it can be started") from None
        try:
            answer = worker.run(job, seconds)
        except WorkerTimeout:
            workers.discard(worker)
            raise ProgramStopped(f"takes longer than {seconds:g} s") from None
        except WorkerDied:
            workers.discard(worker)
            raise ProgramStopped(f"needs more than {num_bytes >> 20} MiB, or ends its process") from None
        except BaseException:  # the pool must not count the worker as busy for ever
            workers.discard(worker)
            raise
        workers.release(worker)
        if answer[:1] != DONE:
            is_own, text = json.loads(answer[1:])
            raise (ProgramFailed if is_own else ProgramRefused)(text)
        return answer[1:]

    def close(self) -> None:
        """End all processes; jobs that run fail."""
        with self._lock:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def _open(self) -> WorkerPool[WorkerProcess]:
        with self._lock:
            if self._workers is None:
                self._workers = WorkerPool(_start, self._most, name="programs")
            return self._workers


def _start(_is_first: bool, ending: Event) -> WorkerProcess:
    return WorkerProcess(_MAIN, b"", ending=ending)


POOL = ProgramPool()
"""Of this process."""
atexit.register(POOL.close)
