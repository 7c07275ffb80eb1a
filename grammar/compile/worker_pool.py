"""The workers of a compile service: started when they are needed, given out one grammar at a time, and replaced.

Starting one takes a second or two, for it imports the libraries and takes in the vocabulary. So whoever wants a worker
while all are busy has another one started, and takes whichever is free first.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Condition

from ..vocabulary import Vocabulary
from .worker_handle import WorkerDied, WorkerHandle, WorkerStarved

# A worker is replaced after so many grammars: whatever memory a library loses with each is bounded by that.
MOST_JOBS = 2_000
# Workers that yield take long to start on a busy machine: nobody waits for the first one, and for one that takes the
# place of another so many seconds.
START_PATIENCE = 5.0


class WorkerPool:
    """The workers of one class for one vocabulary; one is started at once. Every method may be called from any thread.

    Args:
        vocabulary: the tokenizer's tokens.
        most: workers at a time.
        yields: whether they yield.
    """

    def __init__(self, vocabulary: Vocabulary, most: int, *, yields: bool) -> None:
        self._vocabulary = vocabulary
        self._most = most
        self._yields = yields
        self._changed = Condition()
        self._idle: list[WorkerHandle] = []
        self._at_work = 0
        self._starting = 0
        self._waiting = 0
        self._failures = 0  # of starts, of which nobody who waits has heard
        self._closed = False
        self._is_up = False  # one was ready once
        self._starters = ThreadPoolExecutor(most, "grammar-compile-start")
        with self._changed:
            self._start_one()

    def take(self) -> WorkerHandle:
        """A worker, which must be given back or discarded.

        Raises:
            WorkerStarved: if they yield, and there is none because those that start do not get on.
            WorkerDied: if none can be started, or none may be any more.
        """
        with self._changed:
            self._waiting += 1
            try:
                return self._wait()
            finally:
                self._waiting -= 1

    def give_back(self, child: WorkerHandle) -> None:
        """It has done its work."""
        with self._changed:
            self._at_work -= 1
            if not self._closed and child.num_jobs < MOST_JOBS:
                self._idle.append(child)
                self._changed.notify_all()
                return
        self._replace(child)

    def discard(self, child: WorkerHandle) -> None:
        """It is of no use any more."""
        with self._changed:
            self._at_work -= 1
        self._replace(child)

    def close(self) -> None:
        """End those that are idle; the others end when they are given back."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for child in idle:
            child.kill()
        self._starters.shutdown(wait=True, cancel_futures=True)

    def _wait(self) -> WorkerHandle:
        while not self._closed:
            while self._idle:
                child = self._idle.pop()
                if child.is_alive:
                    self._at_work += 1
                    return child
                child.kill()  # somebody ended it while it was idle: no grammar is to blame
            if self._failures:
                self._failures -= 1
                break
            if self._starting < self._waiting:
                self._start_one()
            if not self._yields or self._at_work:
                self._changed.wait()
            elif not self._is_up or not self._changed.wait(START_PATIENCE):
                raise WorkerStarved
        raise WorkerDied

    def _replace(self, child: WorkerHandle) -> None:
        """End a worker that nobody has, and start the one that takes its place."""
        child.kill()
        with self._changed:
            self._start_one()

    def _start_one(self) -> None:
        """Have a worker started, if there may be one more."""
        if not self._closed and self._at_work + len(self._idle) + self._starting < self._most:
            self._starting += 1
            self._starters.submit(self._start)

    def _start(self) -> None:
        child = None
        try:
            child = WorkerHandle(self._vocabulary, yields=self._yields)
        finally:
            with self._changed:
                self._starting -= 1
                late = self._closed
                if child is None:
                    self._failures += bool(self._waiting)
                elif not late:
                    self._idle.append(child)
                    self._is_up = True
                self._changed.notify_all()
        if child is not None and late:
            child.kill()
