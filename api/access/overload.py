"""Overload protection: limits the queue by priority class, tenant and expected wait; refuses with 503 or 429.

    0 ........................................ limit
    |----- batch ------|                               a priority class leaves room for the classes above it
    |----- interactive -----------------|
    |----- realtime -----------------------|

A tenant may have as many waiting sequences and prompt tokens as there are free places (Choudhury and Hahne, "Dynamic
Queue Length Thresholds", 1998). So a single tenant gets half of the queue, and the next tenant still finds a place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce

from ...engine.types import Priority
from ..errors import HTTPError, Rejection
from .wait_estimate import NOTHING, OUTPUT_WEIGHT, AnswerMeter, Capacity, WaitCorrection, Work

ROOM = {Priority.REALTIME: 1.0, Priority.INTERACTIVE: 0.9, Priority.BATCH: 0.5}
"""Fraction of the queue that is open to a priority class."""

MARGIN = 1.5
"""A request is refused if its estimated wait exceeds the limit times this number."""

MEMORY = 20
"""Time in which a correction of estimates halves without new measurements, as a multiple of the class's target."""

_OVERTAKEN = 7  # A sequence with a cached prefix may pass 7 of its tenant: the engine looks at the next eight.


@dataclass(frozen=True, slots=True)
class Load:
    """The sequences and prompt tokens that one HTTP request adds to the queue.

    Attributes:
        is_short: whether all its prompts are short, so that no other prompt overtakes them.
        is_known: whether the engine may have the beginning of a prompt in its cache, so that the prompt overtakes
            others.
        may_be_deferred: whether the request has a grammar or an adapter, which the engine may have to compile or load
            first.
        is_strict: whether to refuse the request if its first token cannot be generated within the target time of its
            class.
        longest: the work of the request's longest prompt.
    """

    tenant: str
    priority: Priority
    sequences: int
    tokens: int
    is_short: bool = True
    is_known: bool = False
    may_be_deferred: bool = False
    is_strict: bool = False
    longest: Work = NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A sequence that generates tokens: the time of its first token, and its expected number of tokens."""

    priority: Priority
    since: float
    expected: float


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """A sequence that has joined a class with a target.

    Attributes:
        at: when it joined, in seconds.
        work: its work.
        least: lower bound of the seconds to its first token, as it was when the sequence joined.
    """

    at: float
    work: Work
    least: float


@dataclass(slots=True)
class _Group:
    """The work of a tenant that waits in one priority class; work that may be deferred is counted separately.

    Attributes:
        ready: work that waits for neither a grammar nor an adapter.
        deferrable: work that may wait for a grammar or an adapter.
        on_time: the sequences of the ready work that have not waited for longer than the target, in the order in which
            they have joined; only in a class with a target.
    """

    ready: Work = NOTHING
    deferrable: Work = NOTHING
    on_time: deque[_Joined] = field(default_factory=deque)

    @property
    def sequences(self) -> int:
        return round(self.ready.sequences + self.deferrable.sequences)

    @property
    def tokens(self) -> int:
        return round(self.ready.tokens + self.deferrable.tokens)

    def change(self, work: Work, sign: int, *, deferrable: bool) -> None:
        """Add work if ``sign`` is 1; remove it if ``sign`` is -1."""
        if deferrable:
            self.deferrable = self.deferrable.plus(work, sign).whole()
        else:
            self.ready = self.ready.plus(work, sign).whole()

    def work_on_time(self) -> Work:
        """Return the work of the sequences that are on time."""
        return reduce(Work.plus, (each.work for each in self.on_time), NOTHING)

    def surely(self, ready: float) -> Work:
        """Return the ready work and the fraction ``ready`` of the deferrable work."""
        return self.ready.plus(self.deferrable, ready) if ready else self.ready


class _Young:
    """Recently joined sequences that may be deferred, as long as the engine has not reported whether they are.

    Two reports of the engine must arrive after a sequence has joined, because the first one may have been sent before.
    """

    def __init__(self) -> None:
        self.work = NOTHING
        self._steps = -1.0
        self._num_reports = 0
        self._joined: deque[tuple[int, Work]] = deque()

    def join(self, work: Work) -> None:
        self._joined.append((self._num_reports, work))
        self.work = self.work.plus(work)

    def hear(self, capacity: Capacity) -> None:
        """Count a report of the engine, if it is a new one."""
        self._num_reports += capacity.steps != self._steps
        self._steps = capacity.steps
        while self._joined and self._joined[0][0] < self._num_reports - 1:
            self.work = self.work.plus(self._joined.popleft()[1], -1)
        if not self._joined:
            self.work = NOTHING


class QueueLimits:
    """Limits on the sequences that wait for their first token. Belongs to one event loop.

    Args:
        max_sequences: largest number of sequences that may wait.
        max_tokens: largest number of tokens in the prompts of waiting sequences.
        max_seconds: longest wait of a request, except in the batch class.
        clock: returns monotonic time in seconds.
        capacity: returns the engine's capacity according to its last statistics.

    Attributes:
        target_ttft: target time to first token in seconds by priority class, for strict requests.
    """

    def __init__(
        self,
        max_sequences: int,
        max_tokens: int,
        max_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        capacity: Callable[[], Capacity] = Capacity,
    ) -> None:
        self.target_ttft: Mapping[Priority, float] = {}
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._max_seconds = max_seconds
        self._clock = clock
        self._capacity = capacity
        self._answers = AnswerMeter()
        self._corrections = {priority: WaitCorrection() for priority in Priority}
        self._waiting: dict[tuple[str, Priority], _Group] = {}
        # Cost that was served to each tenant in each priority class, in units of fair queueing.
        self._served: dict[tuple[str, Priority], float] = {}
        self._last_to_leave = dict.fromkeys(Priority, "")
        self._begun: set[Answer] = set()
        self._deferrable = Work()  # All waiting work that may be deferred.
        self._young = _Young()
        self._all = NOTHING  # all waiting work

    @classmethod
    def before_engine(cls, limits: tuple[int, int, float], stats: Callable[[], Mapping[str, float]]) -> QueueLimits:
        """Return limits for the queue of an engine whose last statistics ``stats`` returns.

        Args:
            limits: largest number of sequences, largest number of tokens, longest wait in seconds.
        """
        return cls(*limits, capacity=lambda: Capacity.told_by(stats()))

    @property
    def sequences(self) -> int:
        return round(self._all.sequences)

    @property
    def tokens(self) -> int:
        return round(self._all.tokens)

    @property
    def short_tokens(self) -> float:
        """Largest number of tokens of a prompt that overtakes longer ones; 0 while it is not known."""
        return self._capacity().short

    def answer_tokens(self, most: int) -> float:
        """Return the expected number of tokens of an answer of at most ``most`` tokens; 0 before any were measured."""
        return min(float(most), self._answers.tokens)

    def waiting(self, priority: Priority) -> int:
        return sum(group.sequences for (_, each), group in self._waiting.items() if each is priority)

    def expected_wait(self, load: Load, *, is_on_time: bool = False) -> float:
        """Return the seconds that a request surely waits for a row and for prompts before its own; 0 while unknown.

        Args:
            is_on_time: whether it is to meet the target of its priority class. Those of its tenant that are late do
                not go before it then.
        """
        capacity = self._capacity()
        ready = self._ready_share(capacity)
        ahead = self._all_of(ready, lambda priority: priority < load.priority)
        for work, part in self._ahead_in_class(load, ready, is_on_time):
            ahead = ahead.plus(work, part)
        return self._seconds(capacity, ahead, load.priority, short=load.is_short)

    def drain_seconds(self, priority: Priority) -> float:
        """Return a lower bound of the seconds until all sequences of this class and higher ones have started, or 0."""
        capacity = self._capacity()
        ahead = self._all_of(self._ready_share(capacity), lambda each: each <= priority)
        return self._seconds(capacity, ahead, priority, short=False)

    def check(self, load: Load) -> None:
        """Check that a request may join the queue. It may always join an empty queue, unless it is strict.

        Raises:
            Rejection: 503 if the queue is full or too slow, 429 if the tenant has too much work in it; both with
                Retry-After.
            HTTPError: 400 for a strict request if its priority class has no target time.
        """
        if load.is_strict:
            self._check_target(load)
        if not self.sequences:
            return
        room = ROOM[load.priority]
        for reason, what, waiting, more, limit in (
            ("max_queued_requests", "requests", self.sequences, load.sequences, self._max_sequences),
            ("max_queued_tokens", "prompt tokens", self.tokens, load.tokens, self._max_tokens),
        ):
            if waiting + more > limit * room:
                text = f"The server is busy: {waiting} {what} are waiting; the limit is {limit}."
                raise Rejection(503, text, reason, self._until_room())
        self._check_wait(load)
        self._check_share(load)

    def join(self, load: Load, work: Work) -> None:
        """Add a sequence of a checked request to the queue."""
        name = load.tenant, load.priority
        least = self._least_ttft(load) if (is_timed := self._is_timed(load)) else 0.0
        if name not in self._waiting:
            self._served[name] = self._lifted(name)
            self._waiting[name] = _Group()
        self._change(load, work, 1)
        if is_timed:
            self._waiting[name].on_time.append(_Joined(self._clock(), work, least))
        if load.may_be_deferred:
            self._young.hear(self._capacity())
            self._young.join(work)

    def leave(self, load: Load, work: Work, *, begun: bool) -> None:
        """Remove a sequence from the queue, because it has its first token or has ended without one.

        Args:
            load: the load of the sequence's request, as it was when it joined.
            work: the work of the sequence, as it was when it joined.
            begun: whether the sequence has a token.
        """
        self._change(load, work, -1)
        name = load.tenant, load.priority
        if self._is_timed(load):
            self._drop_late(load.priority)
            on_time = self._waiting[name].on_time
            if (found := next((each for each in on_time if each.work is work), None)) is not None:
                on_time.remove(found)
                if begun:
                    self._learn(load.priority, found, is_late=False)
        if not self._waiting[name].sequences:
            del self._waiting[name]
            self._last_to_leave[load.priority] = load.tenant
        if begun:
            self.charge(load, work.cost - OUTPUT_WEIGHT * work.answer)

    def charge(self, load: Load, cost: float) -> None:
        """Add work that was done for a tenant, in units of fair queueing."""
        self._served[load.tenant, load.priority] += cost

    def begin(self, load: Load, most: int) -> Answer:
        """Count a sequence that has its first token and will have at most ``most`` tokens.

        It occupies a row until ``end``.
        """
        answer = Answer(load.priority, self._clock(), self.answer_tokens(most))
        self._begun.add(answer)
        return answer

    def end(self, answer: Answer, num_tokens: int | None) -> None:
        """Count the end of a sequence that had started, with the number of its tokens if that is known."""
        self._begun.discard(answer)
        if num_tokens:
            self._answers.add(num_tokens, self._clock() - answer.since)

    def _check_wait(self, load: Load) -> None:
        if load.priority is Priority.BATCH:
            return
        wait = self.expected_wait(load)
        if wait <= MARGIN * self._max_seconds:
            return
        text = f"The server is busy: a new request would wait about {wait:.1f} seconds; at most {self._max_seconds:g}"
        raise Rejection(503, f"{text} are allowed.", "queue_slow", wait - self._max_seconds)

    def _check_target(self, load: Load) -> None:
        name = load.priority.name.lower()
        target = self.target_ttft.get(load.priority)
        if target is None:
            raise HTTPError(
                400,
                f"The header x-slo: strict needs a target for the priority class '{name}', and the server has none: "
                "set it with --target-ttft-ms.",
                code="no_target",
            )
        estimate = self._least_ttft(load)
        if self.sequences:
            estimate *= self._factor(load.priority)
        if estimate > target:
            raise Rejection(
                503,
                f"The first token is expected after {1000 * estimate:.0f} ms; the target of the priority class "
                f"'{name}' is {1000 * target:.0f} ms.",
                "target_ttft",
                estimate - target,
            )

    def _least_ttft(self, load: Load) -> float:
        """Return a lower bound of the time to first token, in seconds, of a request whose class has a target."""
        self._drop_late(load.priority)
        return self.expected_wait(load, is_on_time=True) + self._capacity().own_seconds(load.longest)

    def _factor(self, priority: Priority) -> float:
        return self._corrections[priority].factor(self._clock(), MEMORY * self.target_ttft[priority])

    def _is_timed(self, load: Load) -> bool:
        """Return whether the wait of a request is measured: its class has a target, and the engine defers nothing."""
        return load.priority in self.target_ttft and not load.may_be_deferred

    def _drop_late(self, priority: Priority) -> None:
        """Count the sequences of a class that have waited for longer than its target as late."""
        target = self.target_ttft[priority]
        latest = self._clock() - target
        for (_, each), group in self._waiting.items():
            while each is priority and group.on_time and group.on_time[0].at < latest:
                self._learn(priority, group.on_time.popleft(), is_late=True)

    def _learn(self, priority: Priority, joined: _Joined, *, is_late: bool) -> None:
        """Count whether a sequence was late, if a strict request like it would have been admitted.

        The others were late from the start, and say nothing of the wait behind those that are on time.
        """
        target = self.target_ttft[priority]
        if self._factor(priority) * joined.least <= target:
            self._corrections[priority].add(self._clock(), MEMORY * target, is_late=is_late)

    def _check_share(self, load: Load) -> None:
        groups = [group for (tenant, _), group in self._waiting.items() if tenant == load.tenant]
        # Only the limit of all requests together applies to the first request of a tenant.
        if not load.tenant or not groups:
            return
        own = sum(group.sequences for group in groups)
        left = self._max_sequences - self.sequences
        if own + load.sequences > left:
            text = f"Too many requests of your tenant are waiting: {own}, and only {left} places are left."
            raise Rejection(429, text, "tenant_share", self._until_room())
        own_tokens, left_tokens = sum(group.tokens for group in groups), self._max_tokens - self.tokens
        if own_tokens + load.tokens > left_tokens:
            text = f"Too many prompt tokens of your tenant are waiting: {own_tokens}, and only {left_tokens} are left."
            raise Rejection(429, text, "tenant_share", self._until_room())

    def _until_room(self) -> float:
        """Return the seconds until a tenth of the queue has started."""
        return self.drain_seconds(Priority.BATCH) / 10

    def _change(self, load: Load, work: Work, sign: int) -> None:
        self._waiting[load.tenant, load.priority].change(work, sign, deferrable=load.may_be_deferred)
        self._all = self._all.plus(work, sign).whole()
        if load.may_be_deferred:
            self._deferrable = self._deferrable.plus(work, sign).whole()

    def _lifted(self, name: tuple[str, Priority]) -> float:
        """Return the served work with which a waiting tenant starts: at least the least of all waiting tenants."""
        own, priority = self._served.get(name, 0.0), name[1]
        waiting = (self._served[each] for each in self._waiting if each[1] is priority)
        last = self._served.get((self._last_to_leave[priority], priority), 0.0)
        return max(own, min(waiting, default=last))

    def _all_of(self, ready: float, counts: Callable[[Priority], bool]) -> Work:
        """Return the work of the priority classes for which ``counts`` is true."""
        whole = NOTHING
        for (_, priority), group in self._waiting.items():
            if counts(priority):
                whole = whole.plus(group.surely(ready))
        return whole

    def _ready_share(self, capacity: Capacity) -> float:
        """Return the fraction of the deferrable work that is certainly not deferred."""
        self._young.hear(capacity)
        whole, young = self._deferrable, self._young.work
        if not round(whole.sequences):
            return 0.0
        by_count = 1 - (capacity.deferred + young.sequences) / whole.sequences
        by_tokens = 1 - (capacity.deferred_tokens + young.new) / whole.new if whole.new else 1.0
        return max(0.0, min(by_count, by_tokens))

    def _ahead_in_class(self, load: Load, ready: float, is_on_time: bool) -> Iterator[tuple[Work, float]]:
        """Yield the waiting work of its own priority class and the part of it that goes before a new request.

        Tenants take turns: the tenant that was served least is next. A tenant's work is served first up to the amount
        by which the tenant was served less than the request's own tenant will have been when the request's turn comes.
        """
        name = load.tenant, load.priority
        own = self._waiting.get(name)
        if own is None:
            turn = self._lifted(name)
        else:
            work, count = own.surely(ready), own.sequences
            if is_on_time:
                work = own.work_on_time()
            part = max(0, count - _OVERTAKEN) / count if load.is_known else 1.0
            turn = self._served[name] + part * work.cost
            yield work, part
        for other, group in self._waiting.items():
            lag = turn - self._served[other]
            if other[1] is load.priority and other != name and lag >= 0 and (work := group.surely(ready)).sequences:
                # Of tenants that were served equally, the one that has waited longer is next, with one sequence. In
                # other cases the fraction is rounded down to whole sequences, because a sequence that is only partly
                # within the lag may come after the request.
                count = int(work.sequences * min(1.0, lag / work.cost)) if lag and work.cost else 1
                yield work, min(1.0, count / work.sequences)

    def _seconds(self, capacity: Capacity, ahead: Work, priority: Priority, *, short: bool) -> float:
        by_prompts = capacity.prefill_seconds(ahead, short=short)
        free = capacity.usable - min(len(self._begun), capacity.running)
        # Sequences of the batch class are preempted for others, so their rows count as free.
        if priority is not Priority.BATCH:
            free += sum(each.priority is Priority.BATCH for each in self._begun)
        behind = ahead.sequences + 1 - free
        if behind <= 0 or not ahead.sequences:
            return by_prompts
        now, per_token = self._clock(), self._answers.seconds_per_token
        left = [max(0.0, each.expected * per_token - (now - each.since)) for each in self._begun]
        hold = ahead.answer / ahead.sequences * per_token
        return max(by_prompts, capacity.row_seconds(behind, hold, left))
