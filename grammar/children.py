"""The workers of a compile service: started when they are needed, given out one grammar at a time, and replaced.

Starting one takes a second or two, for it imports the libraries and takes in the vocabulary. So whoever wants a worker
while all are busy has another one started, and takes whichever is free first.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Condition

from grammar.child import CAN_YIELD, Child, ChildDied, ChildStarved
from grammar.vocabulary import Vocabulary

# Where a worker that yields has starved, workers take their share of the cores for so many seconds.
STEADY_SECONDS = 600.0
# A worker is replaced after so many grammars: whatever memory a library loses with each is bounded by that.
MOST_JOBS = 2_000


class Children:
    """The workers for one vocabulary. Every method may be called from any thread.

    Args:
        vocabulary: the tokenizer's tokens.
        most: workers at a time.
    """

    def __init__(self, vocabulary: Vocabulary, most: int) -> None:
        self._vocabulary = vocabulary
        self._most = most
        self._changed = Condition()
        self._idle: list[Child] = []
        self._at_work = 0
        self._starting = 0
        self._waiting = 0
        self._failures = 0  # starts that failed, of which nobody who waits has heard
        self._closed = False
        self._steady_until = 0.0 if CAN_YIELD else float("inf")
        self._starters = ThreadPoolExecutor(most, "grammar-compile-start")

    def warm(self) -> None:
        """Have one that is ready when the first grammar comes."""
        with self._changed:
            self._start_one()

    def take(self) -> Child:
        """A worker, which must be given back or discarded.

        Raises:
            ChildDied: if none can be started, or none may be any more.
        """
        with self._changed:
            self._waiting += 1
            try:
                return self._wait()
            finally:
                self._waiting -= 1

    def give_back(self, child: Child) -> None:
        """It has done its work."""
        with self._changed:
            self._at_work -= 1
            if not self._closed and child.num_jobs < MOST_JOBS:
                self._idle.append(child)
                self._changed.notify_all()
                return
        self._end(child)

    def discard(self, child: Child, *, starved: bool = False) -> None:
        """It is of no use any more: it failed, or it has starved, and so would the next one that yields."""
        with self._changed:
            self._at_work -= 1
            if starved:
                self._steady_until = time.monotonic() + STEADY_SECONDS
        self._end(child)

    def close(self) -> None:
        """End those that are idle; the others end when they are given back."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for child in idle:
            child.kill()
        self._starters.shutdown(wait=True, cancel_futures=True)

    def _wait(self) -> Child:
        while not self._closed:
            yields = self._yields()
            while self._idle:
                child = self._idle.pop()
                if child.is_alive and child.yields is yields:
                    self._at_work += 1
                    return child
                child.kill()  # of the other class; or somebody ended it while it was idle: no grammar is to blame
            if self._failures:
                self._failures -= 1
                break
            if self._starting < self._waiting:
                self._start_one()
            self._changed.wait()
        raise ChildDied

    def _yields(self) -> bool:
        return time.monotonic() >= self._steady_until

    def _end(self, child: Child) -> None:
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
            child = self._started()
        finally:
            with self._changed:
                self._starting -= 1
                late = self._closed
                if child is None:
                    self._failures += bool(self._waiting)
                elif not late:
                    self._idle.append(child)
                self._changed.notify_all()
        if child is not None and late:
            child.kill()

    def _started(self) -> Child | None:
        """A new worker, or None if none starts."""
        try:
            return Child(self._vocabulary, yields=self._yields())
        except ChildStarved:
            self._steady_until = time.monotonic() + STEADY_SECONDS
        except ChildDied:
            return None
        try:
            return Child(self._vocabulary)
        except ChildDied:
            return None
