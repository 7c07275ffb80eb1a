"""Pool of worker processes: started on demand, acquired for one job at a time, and replaced.

Starting a worker takes a second or two, because it imports the libraries and loads the vocabulary. So if all workers
are busy, `acquire` starts another one, and returns the first worker that is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Condition, Event
from typing import Generic, TypeVar

from ...tenancy.thread_calls import NoThread, call_on
from .worker_handle import WorkerDied, WorkerProcess, WorkerStarved

W = TypeVar("W", bound=WorkerProcess)

# Number of jobs after which a worker is replaced. This limits the memory that a library leaks.
MOST_JOBS = 2_000
# Seconds for which `acquire` waits for a replacement of a yielding worker. Such workers take long to start on a busy
# machine, so `acquire` does not wait for the first one at all.
START_PATIENCE = 5.0


class WorkerPool(Generic[W]):
    """Workers of one kind; either all of them yield or none. The first one is started at once. Thread-safe.

    Args:
        start: starts a worker, given whether it is the first and the event that ends waits for it. Raises WorkerDied.
        most: largest number of workers at one time.
        yields: whether the workers yield.
    """

    def __init__(
        self, start: Callable[[bool, Event], W], most: int, *, yields: bool = False, name: str = "grammar-compile"
    ) -> None:
        self._start_worker = start
        self._most = most
        self._yields = yields
        self._changed = Condition()
        self._idle: list[W] = []
        self._busy = 0
        self._starting = 0
        self._waiting = 0
        # Failed starts that were not raised to a waiting thread yet.
        self._failures = 0
        self._ending = Event()
        self._num_started = 0
        self._was_ready = False  # any worker, ever
        self._starters = ThreadPoolExecutor(most, f"{name}-start")
        with self._changed:
            self._start_one()

    def acquire(self) -> W:
        """Return a free worker, which must be released or discarded.

        Raises:
            WorkerStarved: the workers yield, and none is ready because the starting ones make no progress.
            WorkerDied: no worker can be started, or the pool is closed.
        """
        with self._changed:
            self._waiting += 1
            try:
                return self._wait()
            finally:
                self._waiting -= 1

    def release(self, worker: W) -> None:
        """Return a worker to the pool; after `MOST_JOBS` it is replaced."""
        with self._changed:
            self._busy -= 1
            if not self._ending.is_set() and worker.num_jobs < MOST_JOBS:
                self._idle.append(worker)
                self._changed.notify_all()
                return
        self._replace(worker)

    def discard(self, worker: W) -> None:
        """Replace a worker."""
        with self._changed:
            self._busy -= 1
        self._replace(worker)

    def close(self) -> None:
        """End all workers: also those that start or compile, which may take long on a busy machine."""
        with self._changed:
            self._ending.set()
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for worker in idle:
            worker.kill()
        self._starters.shutdown(wait=True, cancel_futures=True)

    def _wait(self) -> W:
        while not self._ending.is_set():
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    self._busy += 1
                    return worker
                # The worker ended while it was idle, so no grammar is at fault.
                worker.kill()
            if self._failures:
                self._failures -= 1
                break
            if self._starting < self._waiting and not self._start_one():
                continue
            if not self._yields or self._busy:
                self._changed.wait()
            elif not self._was_ready or not self._changed.wait(START_PATIENCE):
                raise WorkerStarved
        raise WorkerDied

    def _replace(self, worker: W) -> None:
        """Kill a worker that is not in the pool, and start its replacement."""
        worker.kill()
        with self._changed:
            self._start_one()

    def _start_one(self) -> bool:
        """Start a worker on a thread, unless there are `most`. The caller holds the lock. Returns False without one."""
        if not self._ending.is_set() and self._busy + len(self._idle) + self._starting < self._most:
            self._starting += 1
            started = call_on(self._starters, partial(self._start, not self._num_started))
            self._num_started += 1
            if started.done() and isinstance(started.exception(), NoThread):
                self._starting -= 1
                self._failures += bool(self._waiting)
                self._changed.notify_all()
                return False
        return True

    def _start(self, is_first: bool) -> None:
        worker = None
        try:
            worker = self._start_worker(is_first, self._ending)
        finally:
            with self._changed:
                self._starting -= 1
                closed = self._ending.is_set()
                if worker is None:
                    self._failures += bool(self._waiting)
                elif not closed:
                    self._idle.append(worker)
                    self._was_ready = True
                self._changed.notify_all()
        if worker is not None and closed:
            worker.kill()
