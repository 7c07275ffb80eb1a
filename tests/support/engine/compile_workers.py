"""Compile workers kept from engine to engine: a new one takes half a second of a core, and there are many engines."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Lock

import pytest

from rootgraft.grammar.compile import compile_service
from rootgraft.grammar.compile.worker_handle import WorkerHandle
from rootgraft.grammar.vocabulary import Vocabulary

MOST_IDLE = 4

Key = tuple[tuple[bytes, ...], frozenset[int], tuple[int, ...], int]


class KeptWorker(WorkerHandle):
    """A real worker process that its pool does not end, but leaves to the next pool of the same vocabulary."""

    _idle: list[tuple[Key, KeptWorker]] = []  # noqa: RUF012
    _lock = Lock()
    # A worker ends with the thread that has started it, and those of a pool end with the pool.
    _starters = ThreadPoolExecutor(MOST_IDLE, "kept-workers")

    def __init__(self, vocabulary: Vocabulary, is_first: bool) -> None:
        super().__init__(vocabulary, is_first=is_first)
        self._key = _key(vocabulary)
        self._is_busy = False

    @classmethod
    def take(cls, vocabulary: Vocabulary, *, yields: bool, is_first: bool, ending: Event) -> KeptWorker:
        """Return an idle worker, or a new one, whose start the end of its pool does not break off.

        None of them yields: tests keep all cores busy.
        """
        worker = cls._kept(_key(vocabulary)) or cls._starters.submit(cls, vocabulary, is_first).result()
        worker._ending = ending
        return worker

    @classmethod
    def _kept(cls, key: Key) -> KeptWorker | None:
        with cls._lock:
            for at, (other, worker) in enumerate(cls._idle):
                if other == key and worker.is_alive:
                    del cls._idle[at]
                    return worker
        return None

    def compile(self, job: bytes, seconds: float) -> bytes:
        self._is_busy = True
        answer = super().compile(job, seconds)
        self._is_busy = False
        return answer

    def kill(self) -> None:
        """Keep the worker for the next pool; end it if its last job broke off."""
        if self._is_busy or not self.is_alive:
            return super().kill()
        with self._lock:
            self._idle.append((self._key, self))
            oldest = self._idle.pop(0)[1] if len(self._idle) > MOST_IDLE else None
        if oldest:
            super(KeptWorker, oldest).kill()
        return None

    @classmethod
    def end_all(cls) -> None:
        while cls._idle:
            super(KeptWorker, cls._idle.pop()[1]).kill()


atexit.register(KeptWorker.end_all)


def _key(vocabulary: Vocabulary) -> Key:
    return vocabulary.tokens, vocabulary.special, vocabulary.eos, vocabulary.size


@contextmanager
def kept_workers() -> Iterator[None]:
    """Let the pools that are made within the block take kept workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_service, "WorkerHandle", KeptWorker.take)
        yield
