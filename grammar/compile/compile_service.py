"""Compiling for a server: in processes that can be killed, each grammar once, remembered within a byte budget.

No grammar library bounds its own work, and a thread cannot be stopped, so a compile runs in a child process with limits
of time and memory; a child that passes either is killed and replaced. Children yield the cores to the engine, unless
that leaves them none. Results and refusals are remembered by content. Requests for a grammar that is being compiled
share one future.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ..emit.grammar_artifact import GrammarArtifact
from ..errors import GrammarError, GrammarTimeout
from ..schema.error_location import likeliest_part
from ..spec import GrammarSpec
from ..vocabulary import Vocabulary
from .compile_worker import DONE, decode_error, encode_job
from .compiler import CompiledGrammar, load
from .worker_handle import CAN_YIELD, WorkerDied, WorkerStarved, WorkerTimeout
from .worker_pool import WorkerPool

REFUSAL_BYTES = 1_024
MAX_OBSERVATIONS = 4_096
# A compile that was too slow once may have met a busy machine: it may be tried again after so many seconds.
RETRY_SECONDS = 60.0
# Where a worker that yields has starved, workers take their share of the cores for so many seconds.
STEADY_SECONDS = 600.0
NICENESS = 10  # of threads that load what workers have compiled


class CompileQueueFull(Exception):
    """More grammars wait to be compiled than are allowed to."""


@dataclass(slots=True)
class CompileStats:
    """Counts since the start, and what is held now.

    Attributes:
        hits: answered from memory, or by a compile that was already under way.
        compiled: grammars compiled.
        refused: grammars refused, those that were stopped included.
        stopped: compiles ended by the clock, by the memory limit or by a crash.
        pending: compiles waiting or under way.
        cached: entries held.
        cached_bytes: what they take, about.
    """

    hits: int = 0
    compiled: int = 0
    refused: int = 0
    stopped: int = 0
    pending: int = 0
    cached: int = 0
    cached_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    result: CompiledGrammar | GrammarError
    num_bytes: int
    expires: float

    def is_good(self) -> bool:
        """Whether it may be given out again."""
        if isinstance(self.result, CompiledGrammar) and self.result.is_spoilt:
            return False
        return time.monotonic() < self.expires


class CompileService:
    """Compiles for one vocabulary. Every method may be called from any thread.

    Attributes:
        stats: counts for metrics.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        workers: int = 2,
        seconds: float = 2.0,
        memory_bytes: int = 512 << 20,
        cache_bytes: int = 256 << 20,
        most_pending: int = 256,
    ) -> None:
        """Start a worker that yields and one that does not; others start when they are needed.

        Args:
            vocabulary: the tokenizer's tokens.
            workers: compiles at once, and workers of either class.
            seconds: processor time of one compile, its dry run included; `PATIENCE` times as much by the clock.
            memory_bytes: address space that one compile may add.
            cache_bytes: what compiled grammars may take in memory, about.
            most_pending: compiles waiting or under way, at most.
        """
        self.stats = CompileStats()
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._cache_bytes = cache_bytes
        self._most_pending = most_pending
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._pending: dict[str, Future[CompiledGrammar]] = {}
        self._pool = ThreadPoolExecutor(workers, "grammar-compile", _step_back)
        # Both are ready from the start: a grammar that comes when no core is idle need not wait for a worker to start.
        self._steady = WorkerPool(vocabulary, workers, yields=False)
        self._yielding = WorkerPool(vocabulary, workers, yields=True) if CAN_YIELD else self._steady
        self._steady_until = 0.0
        self._seconds_taken: list[float] = []

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """A future of the compiled grammar; its exception is a `GrammarError` for a refusal.

        Raises:
            CompileQueueFull: if too many compiles wait already.
        """
        with self._lock:
            entry = self._entries.get(spec.key)
            if entry is not None and entry.is_good():
                self._entries.move_to_end(spec.key)
                self.stats.hits += 1
                return _settled(entry.result)
            waiting = self._pending.get(spec.key)
            if waiting is not None:
                self.stats.hits += 1
                return waiting
            if len(self._pending) >= self._most_pending:
                raise CompileQueueFull(f"{self._most_pending} grammars wait to be compiled")
            future: Future[CompiledGrammar] = Future()
            self._pending[spec.key] = future
            self.stats.pending = len(self._pending)
        self._pool.submit(self._run, spec, future)
        return future

    def take_seconds(self) -> list[float]:
        """Seconds of each compile since the last call, refusals included, waiting left out; at most 4096 of them."""
        with self._lock:
            taken, self._seconds_taken = self._seconds_taken, []
        return taken

    def close(self) -> None:
        """End all workers; grammars still waiting are refused."""
        for children in (self._yielding, self._steady):
            children.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for future in self._pending.values():
            future.set_exception(GrammarError("grammar", "", "the server is shutting down"))
        self._pending.clear()

    def _run(self, spec: GrammarSpec, future: Future[CompiledGrammar]) -> None:
        result: CompiledGrammar | GrammarError
        start = time.perf_counter()
        try:
            result = self._compiled(spec)
        except GrammarError as error:
            result = error.copy()
        except Exception as error:  # whatever it is, nobody may wait for ever; and it may pass
            blame = likeliest_part(spec, f"could not be compiled: {type(error).__name__}")
            result = GrammarTimeout(blame.keyword, blame.pointer, blame.reason)
        with self._lock:
            if len(self._seconds_taken) < MAX_OBSERVATIONS:
                self._seconds_taken.append(time.perf_counter() - start)
        self._remember(spec.key, result)
        if isinstance(result, GrammarError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _compiled(self, spec: GrammarSpec) -> CompiledGrammar:
        children = self._yielding if time.monotonic() >= self._steady_until else self._steady
        try:
            body = self._compiled_by(children, spec)
        except WorkerStarved:
            body = self._compiled_by(self._steady, spec)
        if body[:1] != DONE:
            raise decode_error(body)
        return load(GrammarArtifact.decode(body[1:]), self._vocabulary)

    def _compiled_by(self, children: WorkerPool, spec: GrammarSpec) -> bytes:
        """Return what a worker sends. Raises WorkerStarved: no processor time. Raises GrammarTimeout: past a limit."""
        child = children.take()
        try:
            body = child.compile(encode_job(spec, self._seconds, self._memory_bytes), self._seconds)
        except WorkerStarved:
            self._steady_until = time.monotonic() + STEADY_SECONDS
            children.discard(child)
            raise
        except WorkerTimeout:
            children.discard(child)
            raise self._stopped(spec, f"takes longer than {self._seconds:g} s to compile") from None
        except WorkerDied:
            children.discard(child)
            reason = f"needs more than {self._memory_bytes >> 20} MiB to compile, or ends the compiler"
            raise self._stopped(spec, reason) from None
        children.give_back(child)
        return body

    def _stopped(self, spec: GrammarSpec, reason: str) -> GrammarTimeout:
        with self._lock:
            self.stats.stopped += 1
        error = likeliest_part(spec, reason)
        return GrammarTimeout(error.keyword, error.pointer, error.reason)

    def _remember(self, key: str, result: CompiledGrammar | GrammarError) -> None:
        refused = isinstance(result, GrammarError)
        kept, size = (result.copy(), REFUSAL_BYTES) if isinstance(result, GrammarError) else (result, result.num_bytes)
        expires = time.monotonic() + RETRY_SECONDS if isinstance(result, GrammarTimeout) else float("inf")
        with self._lock:
            self._pending.pop(key, None)
            self._entries[key] = _Entry(kept, size, expires)
            self.stats.compiled += not refused
            self.stats.refused += refused
            self.stats.pending = len(self._pending)
            self.stats.cached_bytes = sum(entry.num_bytes for entry in self._entries.values())
            while self.stats.cached_bytes > self._cache_bytes and len(self._entries) > 1:
                _, dropped = self._entries.popitem(last=False)
                self.stats.cached_bytes -= dropped.num_bytes
            self.stats.cached = len(self._entries)


def _step_back() -> None:
    """Have this thread load large grammars behind the engine's threads, whose process this is.

    Not in the class of what is idle, in which it could hold the interpreter's lock and be given no core.
    """
    if sys.platform == "linux":  # elsewhere niceness is that of the whole process
        os.nice(NICENESS)


def _settled(result: CompiledGrammar | GrammarError) -> Future[CompiledGrammar]:
    future: Future[CompiledGrammar] = Future()
    if isinstance(result, GrammarError):
        future.set_exception(result.copy())
    else:
        future.set_result(result)
    return future
