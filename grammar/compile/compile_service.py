"""Compile service: compiles grammars in killable worker processes, and caches them up to a limit of bytes.

No grammar library limits its own work, and a thread cannot be stopped. So a grammar is compiled in a worker process
with limits on processor time and memory; a worker that exceeds either is killed and replaced. If the machine gives a
worker no processor time, or kills it when memory is short, the grammar is not refused: the compile continues or is
repeated, and if it fails in the end, the client may try again. Workers use only processor time that the engine leaves,
unless the engine leaves none. A tenant may use at most as many workers and places in the queue as it leaves free for
others. Results and errors are cached by content; beyond the limit, entries of the tenant with the most bytes are
evicted first. Requests for a grammar that is being compiled share one future.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from ...tenancy.tenant_slots import ShareFull, TenantSlots, Turn
from ...tenancy.thread_calls import NoThread, call_on
from ..emit.grammar_artifact import GrammarArtifact
from ..errors import CompileUnavailable, GrammarError, GrammarTimeout
from ..schema.error_location import complexity_error
from ..spec import GrammarSpec
from ..vocabulary import Vocabulary
from .compile_worker import DONE, decode_error, encode_job
from .compiled_grammar import CompiledGrammar
from .worker_handle import CAN_YIELD, WorkerCrashed, WorkerDied, WorkerHandle, WorkerStarved, WorkerTimeout
from .worker_pool import WorkerPool

logger = logging.getLogger("rootgraft.grammar")

ERROR_BYTES = 1_024
MAX_OBSERVATIONS = 4_096
# Seconds after which a grammar whose compile took too much processor time may be compiled again. Other work on the
# machine can double the processor time of a compile, so the limit may have been exceeded because of it.
RETRY_SECONDS = 60.0
# Number of workers that may end, one after the other, while they compile one grammar.
MOST_TRIES = 2
# Seconds for which new workers do not yield, after a yielding worker got no processor time.
STEADY_SECONDS = 600.0
# Niceness of the threads that load compiled grammars.
NICENESS = 10


class CompileQueueFull(Exception):
    """Too many grammars wait to be compiled."""


@dataclass(slots=True)
class CompileStats:
    """Counters since the start, and gauges.

    Attributes:
        hits: requests served from the cache, or by a compile in flight.
        compiled: grammars compiled.
        refused: grammars refused, stopped ones included.
        stopped: compiles ended by the time limit, by the memory limit or by a crash.
        pending: compiles waiting or in flight.
        cached: entries in the cache.
        cached_bytes: estimated size of these entries and of the vocabulary's cache, which they share.
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
    tenant: str
    shared: Sequence[tuple[object, int]] = ()

    def is_valid(self) -> bool:
        if isinstance(self.result, CompiledGrammar) and self.result.has_failed:
            return False
        return time.monotonic() < self.expires


@dataclass(slots=True)
class _Pending:
    """A compile that waits or runs.

    Attributes:
        future: future of the result, for all callers that requested it.
        turns: for each tenant, its turn for a worker. The first turn that is granted is used.
    """

    spec: GrammarSpec
    future: Future[CompiledGrammar] = field(default_factory=Future)
    turns: dict[str, Turn] = field(default_factory=dict)
    has_begun: bool = False


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
        """Start a worker that yields (see `WorkerHandle`) and one that does not; others start on demand.

        Args:
            workers: largest number of compiles at a time, of yielding workers, and of workers that do not yield.
            seconds: limit on a compile's processor time, dry run included; elapsed time has no limit.
            memory_bytes: limit on the address space that one compile adds.
            cache_bytes: limit on the estimated size of the cached grammars.
            most_pending: limit on compiles that wait for a worker.
        """
        self.stats = CompileStats()
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._pending: dict[str, _Pending] = {}
        self._slots = TenantSlots(workers, most_pending)
        self._is_closed = False
        self._pool = ThreadPoolExecutor(workers, "grammar-compile", _lower_priority)
        # Both are ready from the start: a grammar that arrives while no core is idle need not wait for a worker.
        self._steady = compile_workers(vocabulary, workers, yields=False)
        self._yielding = compile_workers(vocabulary, workers, yields=True) if CAN_YIELD else self._steady
        self._steady_until = 0.0
        self._seconds_taken: list[float] = []

    def compile(self, spec: GrammarSpec, tenant: str = "") -> Future[CompiledGrammar]:
        """Return a future of the compiled grammar, of a `GrammarError`, or of `CompileUnavailable`.

        Args:
            tenant: tenant whose share of workers and queue the compile uses; "" if there is only one tenant.

        Raises:
            CompileQueueFull: too many compiles are pending, for this tenant or in total.
        """
        with self._lock:
            entry = self._entries.get(spec.key)
            if entry is not None and entry.is_valid():
                self._entries.move_to_end(spec.key)
                self.stats.hits += 1
                return _done(entry.result)
            pending = self._pending.get(spec.key)
            if pending is not None:
                self.stats.hits += 1
            else:
                pending = _Pending(spec)
            if pending.has_begun or tenant in pending.turns:
                return pending.future
            try:
                # A compile that another tenant has requested waits for a turn of this tenant too.
                turn = pending.turns[tenant] = self._slots.ask(tenant)
            except ShareFull:
                if pending.turns:
                    return pending.future
                raise CompileQueueFull(f"{self._slots.num_waiting} grammars wait to be compiled") from None
            self._pending[spec.key] = pending
            self.stats.pending = len(self._pending)
        turn.granted.add_done_callback(lambda _: self._begin(pending, turn))
        return pending.future

    def take_seconds(self) -> list[float]:
        """Return the seconds of each compile since the last call (at most 4096), failed ones too, without waiting."""
        with self._lock:
            taken, self._seconds_taken = self._seconds_taken, []
        return taken

    def close(self) -> None:
        """End all workers. Pending compiles fail."""
        for workers in (self._yielding, self._steady):
            workers.close()
        with self._lock:
            self._is_closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        for pending in self._pending.values():
            pending.future.set_exception(CompileUnavailable("The server is shutting down."))
        self._pending.clear()

    def _begin(self, pending: _Pending, turn: Turn) -> None:
        """Compile when a turn is granted. The other turns for the same compile are given back."""
        with self._lock:
            if self._is_closed:
                return
            unused = [turn]
            if not pending.has_begun:
                pending.has_begun = True
                unused = [each for each in pending.turns.values() if each is not turn]
                made = call_on(self._pool, partial(self._run, pending, turn))
        for each in unused:
            self._slots.leave(each)
        if turn not in unused and made.done() and isinstance(made.exception(), NoThread):
            self._settle(
                pending, turn, CompileUnavailable("The grammar could not be compiled now: there is no thread.")
            )

    def _run(self, pending: _Pending, turn: Turn) -> None:
        spec = pending.spec
        result: CompiledGrammar | GrammarError | CompileUnavailable
        start = time.perf_counter()
        try:
            result = self._compiled(spec)
        except GrammarError as error:
            result = error.copy()
        except Exception as error:  # The future must be resolved whatever happens; a retry may succeed.
            logger.error("A grammar could not be compiled", exc_info=error)
            result = CompileUnavailable(f"The grammar could not be compiled now ({type(error).__name__}).")
        with self._lock:
            if len(self._seconds_taken) < MAX_OBSERVATIONS:
                self._seconds_taken.append(time.perf_counter() - start)
        self._settle(pending, turn, result)

    def _settle(
        self, pending: _Pending, turn: Turn, result: CompiledGrammar | GrammarError | CompileUnavailable
    ) -> None:
        self._remember(pending.spec.key, result, turn.tenant)
        self._slots.leave(turn)
        if isinstance(result, CompiledGrammar):
            pending.future.set_result(result)
        else:
            pending.future.set_exception(result)

    def _compiled(self, spec: GrammarSpec) -> CompiledGrammar:
        workers = self._yielding if time.monotonic() >= self._steady_until else self._steady
        tries = MOST_TRIES
        while True:
            try:
                body = self._compiled_by(workers, spec)
                break
            except WorkerStarved:
                workers = self._steady
            except WorkerDied as error:
                if (tries := tries - 1) > 0:
                    continue
                if not isinstance(error, WorkerCrashed):
                    raise
                # Two new workers have ended by themselves, so the grammar is the cause.
                reason = f"needs more than {self._memory_bytes >> 20} MiB to compile, or crashes the compiler"
                raise self._stopped(spec, reason) from None
        if body[:1] != DONE:
            raise decode_error(body)
        return CompiledGrammar(GrammarArtifact.decode(body[1:]), self._vocabulary)

    def _compiled_by(self, workers: WorkerPool[WorkerHandle], spec: GrammarSpec) -> bytes:
        """Return a worker's answer to a compile.

        Raises:
            WorkerStarved: the worker got no processor time.
            WorkerDied: the worker has ended.
            GrammarTimeout: the limit on processor time was exceeded.
        """
        worker = workers.acquire()
        try:
            body = worker.compile(encode_job(spec, self._seconds, self._memory_bytes), self._seconds)
        except WorkerStarved:
            self._steady_until = time.monotonic() + STEADY_SECONDS
            workers.discard(worker)
            raise
        except WorkerTimeout:
            workers.discard(worker)
            raise self._stopped(spec, f"takes longer than {self._seconds:g} s of processor time to compile") from None
        except BaseException:
            # After any error the worker must be returned to the pool or dropped, or it would count as busy for ever.
            workers.discard(worker)
            raise
        workers.release(worker)
        return body

    def _stopped(self, spec: GrammarSpec, reason: str) -> GrammarTimeout:
        with self._lock:
            self.stats.stopped += 1
        return _timeout(spec, reason)

    def _remember(self, key: str, result: CompiledGrammar | GrammarError | CompileUnavailable, tenant: str) -> None:
        """Record that a compile has ended, and cache its result. Beyond the limit, evict from the largest tenant."""
        if isinstance(result, CompileUnavailable):
            with self._lock:
                self._pending.pop(key, None)
                self.stats.pending = len(self._pending)
            return
        expires = time.monotonic() + RETRY_SECONDS if isinstance(result, GrammarTimeout) else float("inf")
        if isinstance(result, GrammarError):
            entry = _Entry(result.copy(), ERROR_BYTES, expires, tenant)
        else:
            entry = _Entry(result, result.artifact.num_bytes, expires, tenant, result.shared)
        with self._lock:
            self._pending.pop(key, None)
            self._entries[key] = entry
            self.stats.compiled += isinstance(result, CompiledGrammar)
            self.stats.refused += isinstance(result, GrammarError)
            self.stats.pending = len(self._pending)
            held: Counter[str] = Counter()
            uses: Counter[object] = Counter()
            for each in self._entries.values():
                held[each.tenant] += each.num_bytes
                for part, size in each.shared:
                    held[each.tenant] += 0 if uses[part] else size
                    uses[part] += 1
            while held.total() > self._cache_bytes and len(self._entries) > 1:
                # The newest entry is kept, because its caller needs it now.
                others = {each.tenant for each in islice(self._entries.values(), len(self._entries) - 1)}
                largest = max(others, key=held.__getitem__)
                oldest = next(each for each, found in self._entries.items() if found.tenant == largest)
                lost = self._entries.pop(oldest)
                held[largest] -= lost.num_bytes
                for part, size in lost.shared:
                    uses[part] -= 1
                    held[largest] -= 0 if uses[part] else size
            self.stats.cached_bytes = held.total() + self._vocabulary.cache.num_bytes
            self.stats.cached = len(self._entries)


def compile_workers(vocabulary: Vocabulary, workers: int, *, yields: bool) -> WorkerPool[WorkerHandle]:
    """Return a pool of workers for a vocabulary."""

    def start(is_first: bool, ending: threading.Event) -> WorkerHandle:
        return WorkerHandle(vocabulary, yields=yields, is_first=is_first, ending=ending)

    return WorkerPool(start, workers, yields=yields)


def _lower_priority() -> None:
    """Raise this thread's niceness, so that loading large grammars delays the engine's threads less.

    The policy SCHED_IDLE is not used, because such a thread could hold the interpreter's lock while it gets no core.
    """
    # On other systems than Linux the niceness applies to the whole process.
    if sys.platform == "linux":
        os.nice(NICENESS)


def _timeout(spec: GrammarSpec, reason: str) -> GrammarTimeout:
    error = complexity_error(spec, reason)
    return GrammarTimeout(error.keyword, error.pointer, error.reason)


def _done(result: CompiledGrammar | GrammarError) -> Future[CompiledGrammar]:
    future: Future[CompiledGrammar] = Future()
    if isinstance(result, GrammarError):
        future.set_exception(result.copy())
    else:
        future.set_result(result)
    return future
