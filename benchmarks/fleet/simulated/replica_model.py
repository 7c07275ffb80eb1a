"""Model of replicas on a fake clock: prefix caches, steps and adapter slots, to compare what routers make of traffic.

A step computes one token for each running sequence and the rest of its budget of prompts, in order. A sequence whose
next page another one on the replica is computing waits for it, as in the engine, and one without its adapter for its
load. The figures are those of the default model on one thread.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from benchmarks.fleet.simulated.traffic import Call, Traffic

PAGE = 16
POOL_PAGES = 700
"""0.25 GiB of KV."""
ROWS, BUDGET = 16, 512
STEP_SECONDS, TOKEN_SECONDS = 0.01, 0.001
SLOTS, LOAD_SECONDS = 4, 0.5
BEAT_SECONDS = 0.25


class Router(Protocol):
    """Chooses a replica for each call. What it needs to know is told by the other methods."""

    def choose(self, number: int, call: Call) -> int:
        """Return the place of the replica that gets a call."""
        ...

    def begun(self, number: int) -> None:
        """Note the first token of a call."""
        ...

    def ended(self, number: int) -> None:
        """Note the end of a call."""
        ...

    def beat(self, replica: int, stats: dict[str, float]) -> None:
        """Take a replica's heartbeat."""
        ...


@dataclass(slots=True)
class Running:
    """A call on a replica: ``pages`` are the hashes of its whole pages, ``left`` prompt tokens to compute."""

    number: int
    call: Call
    pages: list[int]
    came: float
    left: int = -1
    drawn: int = 0


@dataclass
class ReplicaModel:
    """One replica."""

    waiting: list[Running] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    # The adapters on the device, and the time at which each is loaded.
    adapters: OrderedDict[str, float] = field(default_factory=OrderedDict)
    loads: int = 0
    hits: int = 0
    computed: int = 0
    busy: float = 0.0
    calls: int = 0

    def step(self, now: float) -> tuple[float, list[Running], list[Running]]:
        """Compute a step. Returns its seconds, and the calls that have their first token and that end with it."""
        self._admit(now)
        drawing = [each for each in self.running if not each.left]
        budget, begun = BUDGET - len(drawing), []
        for each in self.running:
            given = min(each.left, budget)
            each.left -= given
            budget -= given
            self.computed += given
            if given and not each.left:
                begun.append(each)
                self._keep(each.pages)
        for each in drawing + begun:
            each.drawn += 1
        ended = [each for each in self.running if each.drawn >= len(each.call.answer)]
        for each in ended:
            self.running.remove(each)
            self._keep(pages_of(each.call.adapter, each.call.tokens + each.call.answer))
        seconds = STEP_SECONDS + TOKEN_SECONDS * (BUDGET - budget)
        self.busy += seconds
        return seconds, begun, ended

    @property
    def stats(self) -> dict[str, float]:
        """Return the statistics of its heartbeat."""
        rows = {"running": float(len(self.running)), "waiting": float(len(self.waiting))}
        return {"computed_tokens": float(self.computed), "seconds_step": self.busy, **rows}

    def _admit(self, now: float) -> None:
        for each in tuple(self.waiting):
            if len(self.running) >= ROWS:
                return
            hit = next((at for at, page in enumerate(each.pages) if page not in self.cache), len(each.pages))
            coming = {page for other in self.running if other.left for page in other.pages}
            if (hit < len(each.pages) and each.pages[hit] in coming) or not self._has_adapter(each.call.adapter, now):
                continue
            for page in each.pages[:hit]:
                self.cache.move_to_end(page)
            each.left = max(1, len(each.call.tokens) - hit * PAGE)
            self.hits += len(each.call.tokens) - each.left
            self.waiting.remove(each)
            self.running.append(each)

    def _has_adapter(self, adapter: str | None, now: float) -> bool:
        """Return whether an adapter is loaded; else its load begins, where a slot is free for it."""
        if adapter is None:
            return True
        if adapter not in self.adapters:
            used = {each.call.adapter for each in self.running}
            if len(self.adapters) >= SLOTS:
                gone = next((name for name, at in self.adapters.items() if name not in used and at <= now), None)
                if gone is None:
                    return False
                del self.adapters[gone]
            self.adapters[adapter] = now + LOAD_SECONDS
            self.loads += 1
        self.adapters.move_to_end(adapter)
        return self.adapters[adapter] <= now

    def _keep(self, pages: list[int]) -> None:
        for page in pages:
            self.cache[page] = None
            self.cache.move_to_end(page)
        while len(self.cache) > POOL_PAGES:
            self.cache.popitem(last=False)


def pages_of(adapter: str | None, tokens: array[int]) -> list[int]:
    """Return a hash of each whole page and all before it."""
    last, pages = hash(adapter), []
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        last = hash((last, tokens[start : start + PAGE].tobytes()))
        pages.append(last)
    return pages


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a router for some traffic.

    Attributes:
        hit_rate: prompt tokens that were found in a prefix cache, as a part of all.
        load: calls of the replica with the most over the mean.
        loads: of adapters.
        seconds: until the last answer.
        waits: seconds to the first token, by adapter.
    """

    hit_rate: float
    load: float
    loads: int
    seconds: float
    waits: dict[str | None, list[float]]


def play(traffic: Traffic, router: Router, num_replicas: int) -> Outcome:
    """Let a router send all calls to replicas; return what came of it."""
    return _Play(traffic, router, num_replicas).run()


class _Play:
    def __init__(self, traffic: Traffic, router: Router, num_replicas: int) -> None:
        self._traffic = traffic
        self._router = router
        self._replicas = [ReplicaModel() for _ in range(num_replicas)]
        self._events: list[tuple[float, int, int]] = []  # time, order, and the replica whose step ends; -1 for a call
        self._order = count()
        self._results: dict[int, tuple[list[Running], list[Running]]] = {}  # Results of the running steps.
        self._beaten = [0.0] * num_replicas
        self._open: set[int] = set()
        self._done: set[int] = set()
        self._left = list(range(len(traffic.calls)))  # in the order of their times
        self._waits: dict[str | None, list[float]] = {}

    def run(self) -> Outcome:
        now = 0.0
        for at in sorted({call.at for call in self._traffic.calls}):
            self._add(at, -1)
        while self._events:
            now, _, place = heapq.heappop(self._events)
            if place >= 0:
                self._end_step(place, now)
            self._send(now)
            for idle in range(len(self._replicas)):
                self._begin_step(idle, now)
        assert len(self._done) == len(self._traffic.calls), "a call was not answered"
        prompts = sum(len(call.tokens) for call in self._traffic.calls)
        counts = [replica.calls for replica in self._replicas]
        return Outcome(
            hit_rate=sum(replica.hits for replica in self._replicas) / prompts,
            load=max(counts) * len(counts) / sum(counts),
            loads=sum(replica.loads for replica in self._replicas),
            seconds=now,
            waits=self._waits,
        )

    def _add(self, at: float, place: int) -> None:
        heapq.heappush(self._events, (at, next(self._order), place))

    def _send(self, now: float) -> None:
        """Send the calls whose time has come, as far as so many are allowed at a time."""
        for number in tuple(self._left):
            call = self._traffic.calls[number]
            if len(self._open) >= self._traffic.concurrency or call.at > now:
                return
            if not self._done.issuperset(call.after):
                continue
            self._left.remove(number)
            self._open.add(number)
            replica = self._replicas[self._router.choose(number, call)]
            replica.calls += 1
            replica.waiting.append(Running(number, call, pages_of(call.adapter, call.tokens), now))

    def _begin_step(self, place: int, now: float) -> None:
        replica = self._replicas[place]
        if place not in self._results and (replica.running or replica.waiting):
            seconds, begun, ended = replica.step(now)
            self._results[place] = begun, ended
            self._add(now + seconds, place)

    def _end_step(self, place: int, now: float) -> None:
        begun, ended = self._results.pop(place)
        for each in begun:
            self._router.begun(each.number)
            self._waits.setdefault(each.call.adapter, []).append(now - each.came)
        for each in ended:
            self._router.ended(each.number)
            self._open.discard(each.number)
            self._done.add(each.number)
        if now - self._beaten[place] >= BEAT_SECONDS:
            self._beaten[place] = now
            self._router.beat(place, self._replicas[place].stats)
