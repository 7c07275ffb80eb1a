"""Admission before the real scheduler, prefix cache and step costs, with a device that only takes time.

The clock is the device's. A run is a function of its arrivals. So what a refused request would have waited is found by
another run, in which it is taken.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field

from rootgraft.api.access.api_keys import Key
from rootgraft.api.access.known_prefixes import marks_of
from rootgraft.api.access.overload import QueueLimits
from rootgraft.api.access.rate_limits import RateLimits
from rootgraft.api.access.request_admission import Demand, QueueTicket, RequestAdmission
from rootgraft.api.access.wait_estimate import Capacity
from rootgraft.api.errors import Rejection
from rootgraft.engine.batch import Batch, RowResult, StepResult
from rootgraft.engine.engine_stats import EngineStats
from rootgraft.engine.kv_cache.prefix_cache import PrefixCache
from rootgraft.engine.messages import Done, TokenOut
from rootgraft.engine.scheduling.scheduler import Scheduler
from rootgraft.engine.scheduling.step_cost_model import StepWork, work_of
from rootgraft.engine.sequence.sequence import Sequence, SequenceSpec
from rootgraft.engine.types import Priority, SamplingParams
from rootgraft.radix.namespace import Namespace, Path

WORD = 3  # of all answers
HEARTBEAT_SECONDS = 0.25


@dataclass(frozen=True)
class Arrival:
    """A request.

    Attributes:
        at: seconds.
        prompt: its tokens.
        answer: tokens until the model ends it.
        most: that it asks for; None for as many.
        compile: seconds until its grammar is ready; 0 without one.
    """

    at: float
    prompt: array[int]
    answer: int = 8
    most: int | None = None
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    compile: float = 0.0
    is_strict: bool = False


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: for itself, and for each decode token, prefill token and query-key pair of a prefill.

    Attributes:
        target_ttft: of interactive requests, in seconds; 0 for none.
    """

    step: float = 0.01
    decode: float = 0.001
    prefill: float = 0.0005
    pair: float = 1e-8
    rows: int = 16
    budget: int = 512
    pages: int = 20_000
    max_queue_seconds: float = 60.0
    target_ttft: float = 0.0

    def seconds(self, work: StepWork) -> float:
        return (
            self.step
            + self.decode * work.decode_tokens
            + self.prefill * work.prefill_tokens
            + self.pair * work.prefill_pairs
        )


@dataclass
class Run:
    """What came of the arrivals, by their index.

    Attributes:
        refused: the reason of each refusal, and the seconds that it told to come back after.
        waits: seconds from the arrival to the first token.
    """

    refused: dict[int, tuple[str, int]] = field(default_factory=dict)
    waits: dict[int, float] = field(default_factory=dict)

    def slow(self) -> list[int]:
        """Return the arrivals that were refused for their wait."""
        return [index for index, (reason, _) in self.refused.items() if reason == "queue_slow"]


class Simulation:
    """Runs arrivals, in order of time, through admission and engine.

    Args:
        taken: arrival that is not asked whether it may join.
    """

    def __init__(self, machine: Machine, arrivals: Seq[Arrival], taken: int | None = None) -> None:
        self.machine, self.arrivals, self.taken = machine, arrivals, taken
        self.now = 0.0
        self.stats = EngineStats()
        targets = {Priority.INTERACTIVE: machine.target_ttft} if machine.target_ttft else {}
        self.scheduler = Scheduler(
            PrefixCache(machine.pages, 16, sharing=True),
            max_num_seqs=machine.rows,
            max_num_batched_tokens=machine.budget,
            stats=self.stats,
            target_itl=dict.fromkeys((Priority.REALTIME, Priority.INTERACTIVE), 0.1),
            target_ttft=targets,
            clock=lambda: self.now,
        )
        self.capacity, self.told_at = Capacity(), 0.0
        limits = QueueLimits(1 << 20, 1 << 40, machine.max_queue_seconds, lambda: self.now, lambda: self.capacity)
        limits.target_ttft = targets
        self.admission = RequestAdmission(limits, RateLimits(lambda: self.now))
        self.compiling: list[tuple[float, int]] = []
        self.tickets: dict[int, QueueTicket] = {}
        self.run = Run()

    def go(self) -> Run:
        """Run until all that was taken has ended; of a run with ``taken``, until this one has its first token."""
        coming = 0
        while coming < len(self.arrivals) or self.tickets:
            while coming < len(self.arrivals) and self.arrivals[coming].at <= self.now:
                self._arrive(coming)
                coming += 1
            while self.compiling and self.compiling[0][0] <= self.now:
                self._queue(heapq.heappop(self.compiling)[1])
            batch = self.scheduler.schedule()
            if batch.rows:
                self._compute(batch)
            else:
                ahead = [self.compiling[0][0]] if self.compiling else []
                ahead += [self.arrivals[coming].at] if coming < len(self.arrivals) else []
                assert ahead, "what is left can never run"
                self.now = min(ahead)
                self._tell()
            if self.taken in self.run.waits:
                break
        return self.run

    def _arrive(self, index: int) -> None:
        arrival = self.arrivals[index]
        most = arrival.answer if arrival.most is None else arrival.most
        demand = Demand(
            arrival.priority,
            ((len(arrival.prompt), 1, most),),
            (marks_of(arrival.prompt),),
            may_be_deferred=arrival.compile > 0,
            is_strict=arrival.is_strict,
        )
        key = Key("k", b"", arrival.tenant)
        try:
            with self._unchecked(index == self.taken):
                self.tickets[index] = self.admission.admit(key, demand)
        except Rejection as error:
            self.run.refused[index] = error.reason, int((error.headers or {})["retry-after"])
            return
        if arrival.compile:
            heapq.heappush(self.compiling, (self.now + arrival.compile, index))
        else:
            self._queue(index)

    @contextmanager
    def _unchecked(self, is_taken: bool) -> Iterator[None]:
        limits = self.admission.queue_limits
        if is_taken:
            limits.check = lambda load: None  # type: ignore[method-assign]
        yield
        limits.__dict__.pop("check", None)

    def _queue(self, index: int) -> None:
        arrival = self.arrivals[index]
        self.scheduler.add(
            Sequence(
                index,
                array("i", arrival.prompt),
                SamplingParams(max_tokens=arrival.answer),
                Path(Namespace("base", None)),
                SequenceSpec(frozenset(), 0, self.now, 10**9, tenant=arrival.tenant),
                priority=arrival.priority,
            )
        )

    def _compute(self, batch: Batch) -> None:
        self.now += self.machine.seconds(work_of(batch))
        result = StepResult(tuple(RowResult((WORD,) if row.draws else ()) for row in batch.rows))
        for message in self.scheduler.commit(batch, result):
            ticket = self.tickets[message.id]
            if isinstance(message, TokenOut):
                self.run.waits.setdefault(message.id, self.now - self.arrivals[message.id].at)
                ticket.take((0, 0), len(message.tokens))
            elif isinstance(message, Done):
                ticket.take((0, 0), 0)
                self.tickets.pop(message.id).close()
        self._tell()

    def _tell(self) -> None:
        """Report the engine's state, as its heartbeats do."""
        if self.now - self.told_at < HEARTBEAT_SECONDS:
            return
        self.told_at = self.now
        waiting = [len(self.arrivals[index].prompt) for _, index in self.compiling]
        stats = {
            **self.scheduler.capacity(),
            "running": self.scheduler.num_running,
            "waiting_deferred": len(waiting),
            "waiting_deferred_tokens": sum(waiting),
            "engines": 1,
            "steps": self.stats.steps,
        }
        self.capacity = Capacity.told_by(stats)


def true_wait(machine: Machine, arrivals: Seq[Arrival], index: int) -> float:
    """Return the seconds to the first token of a refused request, had it been taken; later ones come as they did."""
    return Simulation(machine, arrivals, index).go().waits[index]
