"""Program pool: runs untrusted programs in worker processes, each with a deadline that ends it.

A thread cannot be stopped, and native code may hold the interpreter's lock. So programs that come from a client or a
publisher, such as templates, run in worker processes that can be killed. All callers in this process share the workers,
which are started for the first job and then kept. A tenant may occupy at most as many workers, and threads that wait
for workers, as it leaves free for others. So programs that use up their time limit do not block other tenants.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable
from threading import Event, Lock
from typing import Any, TypeVar

from ...grammar.compile.compile_worker import DONE
from ...grammar.compile.worker_handle import WorkerCrashed, WorkerDied, WorkerProcess, WorkerTimeout
from ...grammar.compile.worker_pool import WorkerPool
from ...tenancy.current_tenant import CURRENT_TENANT
from ...tenancy.tenant_slots import ShareFull, TenantSlots
from ...tenancy.tenant_threads import TenantThreads
from ...tenancy.thread_calls import NoThread
from ..errors import CapacityError
from .program_worker import encode_job

TEMPLATE_SECONDS = 2.0
"""Processor time of one render of a chat template."""
TOKENIZER_SECONDS = 5.0
"""Of one text that a tokenizer encodes, and of building it."""
VALIDATION_SECONDS = 2.0
"""Of one answer's validation."""
MEMORY_BYTES = 512 << 20
"""Address space that one job may add."""
MOST_WORKERS = max(2, min(4, os.cpu_count() or 1))
"""Jobs at a time; at least two, of which a tenant leaves one."""
MOST_CALLS = 1024
"""Calls that wait for a thread, of which a tenant gets half."""
MOST_TRIES = 2
"""Processes that may be killed from outside, one after the other, over one job."""
_MOST_THREADS = 32  # threads that wait for processes
_MAIN = "from rootgraft.engine.sandbox.program_worker import main; main()"


T = TypeVar("T")


class ProgramRefused(Exception):
    """A program fails, or was ended at a limit. The text goes on after the program's name."""


class ProgramFailed(ProgramRefused):
    """The function that runs a program refuses it. The text is the whole of its error's."""


class ProgramStopped(ProgramRefused):
    """A program was ended at a limit on its time or memory."""


class ProgramPool:
    """Runs jobs in worker processes. Thread-safe.

    ``run`` blocks until the job has ended, so it must not be called on the thread of an event loop.

    Args:
        most: largest number of jobs that run at the same time.
    """

    def __init__(self, most: int = MOST_WORKERS) -> None:
        self._most = most
        self._jobs = TenantSlots(most)
        self._lock = Lock()
        self._workers: WorkerPool[WorkerProcess] | None = None
        self._threads = TenantThreads(_MOST_THREADS, "programs", MOST_CALLS)

    async def off_loop(self, call: Callable[[], T]) -> T:
        """Make a call that may run programs on a separate thread, and await its result without blocking the event loop.

        Raises:
            CapacityError: as many calls of the current tenant wait as the limit allows, or no thread can be started.
        """
        try:
            return await self._threads.call(CURRENT_TENANT.get(), call)
        except ShareFull:
            raise CapacityError(
                "Too many requests are waiting for their chat templates or tokenizers to run."
            ) from None
        except NoThread:
            raise CapacityError(
                "No thread can be started now for the templates and tokenizers of requests: try again."
            ) from None

    def run(self, program: str, seconds: float, arguments: Any, data: bytes = b"", *, memory: int = 0) -> bytes:
        """Run a function in a worker process as soon as the current tenant has its turn, and return its result.

        Args:
            program: the function, as ``module:name`` below the package.
            seconds: limit on processor time.
            arguments: arguments of JSON's types.
            memory: bytes of address space in place of ``MEMORY_BYTES``.

        Raises:
            ProgramRefused: the program fails, or was ended at a limit.
            CapacityError: no process can be started, or the started processes were killed from outside.
        """
        num_bytes = memory or MEMORY_BYTES
        job = encode_job(program, seconds, num_bytes, arguments, data)
        # Opened before the turn: jobs that wait while the pool is closed do not open it again.
        workers = self._open()
        with self._jobs.hold(CURRENT_TENANT.get()):
            answer = _run(workers, job, seconds, num_bytes)
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


def _run(workers: WorkerPool[WorkerProcess], job: bytes, seconds: float, num_bytes: int) -> bytes:
    """Run a job in a free worker, and again in another if the worker is killed, such as when memory runs out."""
    for _ in range(MOST_TRIES):
        try:
            worker = workers.acquire()
        except WorkerDied:
            raise CapacityError(
                "No process can be started now for the templates and tokenizers of requests: try again."
            ) from None
        try:
            answer = worker.run(job, seconds)
        except WorkerTimeout:
            workers.discard(worker)
            raise ProgramStopped(f"takes longer than {seconds:g} s") from None
        except WorkerCrashed:
            workers.discard(worker)
            raise ProgramStopped(f"needs more than {num_bytes >> 20} MiB, or ends its process") from None
        except WorkerDied:
            workers.discard(worker)
            continue
        except BaseException:
            # The pool must not count the worker as busy for ever.
            workers.discard(worker)
            raise
        workers.release(worker)
        return answer
    raise CapacityError("The processes for the templates and tokenizers of requests are killed immediately: try again.")


def _start(_is_first: bool, ending: Event) -> WorkerProcess:
    return WorkerProcess(_MAIN, b"", ending=ending)


POOL = ProgramPool()
"""Of this process."""
atexit.register(POOL.close)
