"""A fleet on a fake clock: the real ``Dispatcher`` and ``AutoscalePolicy``, replicas and a network that misbehave.

A replica draws tokens that follow from prompt, seed, base model, adapter's version and position alone, as the engine
does, so what a client must get is known. The network delays frames, so that they overtake each other, repeats some, and
loses a replica for a while, which then comes back and talks on. Replicas are killed, freeze, are slow, drain, and are
replaced by ones with another base model; adapters get new versions; some requests kill every replica that runs them.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from zlib import crc32

from rootgraft.engine.errors import CapacityError
from rootgraft.engine.messages import (
    Abort,
    AdapterChanged,
    CachedPrefixes,
    Done,
    Failed,
    FetchKv,
    Heartbeat,
    KvBlocks,
    ListPrefixes,
    Message,
    ReadKv,
    Ready,
    Submit,
    TokenOut,
)
from rootgraft.engine.types import FinishReason, KvPrefix, Logprob, SamplingParams, Usage
from rootgraft.fleet.dispatcher import MOST_DEATHS, Dispatcher, DispatcherLimits
from rootgraft.fleet.scaling.autoscaling import AutoscalePolicy, FleetLoad, ScaleState
from rootgraft.radix.namespace import Namespace, Path

SECONDS = 40.0  # in which requests come
ROWS, BUDGET = 4, 64  # Rows and tokens of a replica's step.
STEP, BEAT = 0.05, 0.5
LIMITS = DispatcherLimits(
    most_replicas=16, most_bytes=400_000, most_held=24, hold_seconds=45.0, heartbeat_seconds=3.0, adapter_slots=2,
    adapter_load_seconds=0.2, least_fetched=64, least_prefill=80, most_transfers=4,
)  # fmt: skip
CHECKED = 0.05  # Share of the events after which all equations of the dispatcher are checked.
POISON = 666  # the first token of a prompt that kills its replica,
POISON_TOKENS = 2  # once it has so many tokens


def truth(submit: Submit, base: str) -> list[int]:
    """All tokens of a sequence, of which the last is the stop token that ends it if there are fewer than allowed."""
    params = submit.params
    start = crc32(submit.tokens.tobytes() + repr((params.seed, base, submit.adapter)).encode())
    length = min(params.max_tokens, 1 + start % 60)
    return [(start * (2 * position + 1) >> 7) % 50_000 for position in range(length)]


@dataclass
class Running:
    """A sequence on a replica."""

    submit: Submit
    tokens: list[int]
    computed: int = 0
    drawn: int = 0
    waits: bool = False  # Whether the sequence waits for KV of another replica.


@dataclass
class FakeReplica:
    """An engine of integers behind a network."""

    name: str
    base: str
    slowness: float
    alive: bool = True
    cut_until: float = 0.0
    frozen_until: float = 0.0
    number: int = 0
    computed: int = 0
    seconds: float = 0.0
    running: dict[int, Running] = field(default_factory=dict)
    killer: Submit | None = None
    num_read: int = 0  # answers to other replicas

    def receive(self, message: Message) -> list[Message]:
        if isinstance(message, Submit):
            drawn = len(message.generated)
            assert message.id not in self.running and drawn < message.params.max_tokens
            tokens = truth(replace(message, generated=array("i")), self.base)
            assert tokens[:drawn] == list(message.generated), "tokens of another version, or not all"
            self.running[message.id] = Running(message, tokens, drawn=drawn, waits=message.peer_tokens > 0)
            if message.peer_tokens:
                assert message.peer_tokens <= len(message.tokens) + drawn
                return [FetchKv(message.id, Path(Namespace(self.base)), message.tokens, 0)]
        elif isinstance(message, ReadKv):
            self.num_read += 1
            part = KvBlocks(message.id, (b"page",), is_last=False)
            return [*([part] * (self.num_read % 3)), KvBlocks(message.id, (), is_last=True)]
        elif isinstance(message, ListPrefixes):
            prompts = [each.submit.tokens for each in self.running.values()][:3] or [array("i", range(200))]
            path = Path(Namespace(self.base))
            return [CachedPrefixes(message.id, tuple(KvPrefix(path, tokens, 0, None) for tokens in prompts))]
        elif isinstance(message, KvBlocks):
            if message.is_last and message.id in self.running:
                self.running[message.id].waits = False
        elif isinstance(message, Abort):
            ended = [number for number in message.ids if number in self.running]
            return [self._done(number, FinishReason.ABORT, None) for number in ended]
        return []

    def step(self) -> list[Message]:
        """Compute a step; the replica may die of a poisoned sequence."""
        out: list[Message] = []
        budget = BUDGET
        able = [(number, each) for number, each in self.running.items() if not each.waits]
        by_priority = sorted(able, key=lambda item: item[1].submit.priority)
        for number, each in by_priority[:ROWS]:
            wanted = len(each.submit.tokens) + each.drawn - each.computed
            given = min(wanted, budget)
            each.computed += given
            budget -= given
            self.computed += given
            if given == wanted and budget >= 0 and given:
                if each.submit.tokens[0] == POISON and each.drawn >= POISON_TOKENS:
                    self.alive, self.killer = False, each.submit
                    return []
                out += self._draw(number, each)
        return out

    def _draw(self, number: int, each: Running) -> list[Message]:
        token, at = each.tokens[each.drawn], each.drawn
        params = each.submit.params
        each.drawn += 1
        prompt: tuple[Logprob, ...] = ()
        if params.prompt_logprobs == 0 and not at:
            prompt = tuple(Logprob(t, 0.0, 1, ()) for t in each.submit.tokens[1:])
        is_last = each.drawn == len(each.tokens)
        if is_last and each.drawn < params.max_tokens:
            said = [TokenOut(number, (), (), prompt)] if prompt else []
            return [*said, self._done(number, FinishReason.STOP, token)]
        score = (Logprob(token, -float(at), 1, ()),)
        said = [TokenOut(number, (token,), score, prompt)]
        return [*said, self._done(number, FinishReason.LENGTH, None)] if is_last else list(said)

    def _done(self, number: int, reason: FinishReason, stop: int | None) -> Done:
        each = self.running.pop(number)
        return Done(number, reason, Usage(len(each.submit.tokens), 0, each.drawn), stop)

    def heartbeat(self) -> Heartbeat:
        stats = {"computed_tokens": self.computed, "seconds_step": self.seconds, "running": float(len(self.running))}
        stats["pages_cached"] = float(self.computed)
        return Heartbeat(stats, {})


@dataclass
class Client:
    """A client's request, and the tokens that it received."""

    submit: Submit
    adapter: str | None  # the version that its name meant
    tokens: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0
    end: Done | Failed | None = None

    @property
    def is_poison(self) -> bool:
        return self.submit.tokens[0] == POISON

    def take(self, message: Message) -> None:
        assert self.end is None, "a message after the end"
        if isinstance(message, TokenOut):
            self.tokens += message.tokens
            self.num_logprobs += len(message.logprobs)
            self.num_prompt_logprobs += len(message.prompt_logprobs)
        else:
            assert isinstance(message, (Done, Failed))
            self.end = message

    def check(self, bases: Sequence[str]) -> str:
        """Check the whole answer. Returns how it ended."""
        assert self.end is not None, f"no end for {self.submit}"
        asked = replace(self.submit, adapter=self.adapter)
        wholes = [truth(asked, base) for base in bases]
        assert any(whole[: len(self.tokens)] == self.tokens for whole in wholes), "tokens of two versions"
        assert self.num_logprobs == len(self.tokens)
        most = len(self.submit.tokens) - 1 if self.submit.params.prompt_logprobs == 0 else 0
        assert self.num_prompt_logprobs in ((most,) if self.tokens else (0, most)), "logprobs of the prompt twice"
        if isinstance(self.end, Failed):
            if self.end.kind == "EngineError":
                return "poisoned" if self.is_poison else "unlucky"
            assert self.end.kind == "EngineDead", self.end
            is_latest = wholes[-1][: len(self.tokens)] == self.tokens
            assert self.is_poison or not is_latest, "given up, though replicas with its base model come"
            return "base gone"
        assert not self.is_poison or len(self.tokens) <= POISON_TOKENS, "a poisoned sequence that ends"
        if self.end.reason is FinishReason.ABORT:
            return "aborted"
        said = [*self.tokens, *([] if self.end.stop_token is None else [self.end.stop_token])]
        assert said in wholes, "a token is missing, or was sent twice"
        assert self.end.usage.completion == len(said)
        return "whole"


class Simulation:
    """One seed: events in order of time, and every invariant after each.

    Attributes:
        counts: what happened.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.dispatcher = Dispatcher(LIMITS, seed)
        self.policy = AutoscalePolicy(least=self.random.choice((0, 1, 2)), most=5, rows=4)
        self.scale = ScaleState()
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.names = count()
        self.bases = ["base-1"]
        self.replicas: dict[str, FakeReplica] = {}
        self.killed_by: Counter[int | None] = Counter()
        self.starting = 0
        self.clients: dict[int, Client] = {}
        self.versions: dict[str, str] = {}
        self.roles = self.random.choice((("both",), ("prefill", "decode"), ("prefill", "decode", "both")))
        self.counts: Counter[str] = Counter()
        self.most_bytes = 0
        self.stems = [[self.random.randrange(600) for _ in range(self.random.choice((0, 70, 200)))] for _ in range(4)]

    def run(self) -> Counter[str]:
        """Run to the end. AssertionError if an invariant is violated."""
        for _ in range(self.random.randint(1, 3)):
            self._start()
        self.at(0.1, self._arrive)
        self.at(0.5, self._tick)
        self.at(self.random.uniform(1, 8), self._harm)
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()
            self._pump()
            if self.random.random() < CHECKED:
                self.dispatcher.check()
            self.most_bytes = max(self.most_bytes, self.dispatcher.num_bytes)
            assert self.now < 40 * SECONDS, "it does not come to an end"
        for client in self.clients.values():
            self.counts[client.check(self.bases)] += 1
        assert self.dispatcher.num_open == self.dispatcher.num_bytes == 0, "the journal keeps what has ended"
        assert self.most_bytes <= LIMITS.most_bytes
        # Each of its tokens may be on the way when its replica dies: then it has a new token, and is free again.
        most = MOST_DEATHS + POISON_TOKENS
        assert max(self.killed_by.values(), default=0) <= most, "a poisoned sequence is tried too often"
        self.counts["replays"] += self.dispatcher.num_replays
        self.counts["copies"] += sum(replica.num_read for replica in self.replicas.values())
        return self.counts

    def at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.order), event))

    @property
    def _busy(self) -> bool:
        return self.now < SECONDS or self.dispatcher.num_open > 0

    def _pump(self) -> None:
        """Carry what the dispatcher has to say."""
        for name, message in self.dispatcher.take_sent():
            self.at(self._delay(self.replicas[name]), self._to_replica(name, message))
        for said in self.dispatcher.take_delivered():
            if not isinstance(said, AdapterChanged):
                self.clients[said.id].take(said)  # type: ignore[union-attr]
        for name in self.dispatcher.take_lost():
            self.counts["lost"] += 1
            self.at(self.random.uniform(0, 8), lambda name=name: self._kill(name))  # type: ignore[misc]

    def _to_replica(self, name: str, message: Message) -> Callable[[], None]:
        def arrive() -> None:
            replica = self.replicas[name]
            if replica.alive and (out := replica.receive(message)):
                self._send(replica, out)

        return arrive

    def _delay(self, replica: FakeReplica) -> float:
        """Time on the network: a replica that is cut off is reached when it is back."""
        return self.random.expovariate(50) + max(0.0, replica.cut_until - self.now)

    def _send(self, replica: FakeReplica, messages: list[Message]) -> None:
        number, replica.number = replica.number, replica.number + 1
        for _ in range(2 if self.random.random() < 0.05 else 1):
            self.at(
                self._delay(replica),
                lambda: self.dispatcher.take(replica.name, number, messages, self.now),
            )

    def _start(self) -> None:
        """Start a replica, which is ready after a while."""
        self.starting += 1
        replica = FakeReplica(f"r{next(self.names)}", self.bases[-1], self.random.choice((1.0, 1.0, 1.0, 8.0)))

        def join() -> None:
            self.starting -= 1
            self.replicas[replica.name] = replica
            ready = Ready(1000, 50_000, 64, 16, (), base_digest=replica.base)
            role = self.random.choice(self.roles)
            self.dispatcher.join(replica.name, ready, self.now, role=role)
            self.counts[role] += 1
            self._step(replica)
            self._beat(replica)

        self.at(self.random.uniform(0.5, 4), join)

    def _step(self, replica: FakeReplica) -> None:
        if not replica.alive or not self._busy:
            return
        seconds = STEP * replica.slowness * self.random.uniform(0.5, 1.5)
        if replica.frozen_until > self.now:
            self.at(replica.frozen_until - self.now, lambda: self._step(replica))
            return
        if replica.running:
            replica.seconds += seconds
            out = replica.step()
            if out:
                self._send(replica, out)
            if replica.killer is not None:
                self.killed_by[replica.killer.params.seed] += 1
                self.counts["died of poison"] += 1
                self._notice(replica.name)
        self.at(seconds, lambda: self._step(replica))

    def _beat(self, replica: FakeReplica) -> None:
        if replica.alive and self._busy:
            if replica.frozen_until <= self.now:
                self._send(replica, [replica.heartbeat()])
            self.at(BEAT, lambda: self._beat(replica))

    def _kill(self, name: str) -> None:
        replica = self.replicas[name]
        if replica.alive:
            replica.alive = False
            self.counts["killed"] += 1
            self._notice(name)

    def _notice(self, name: str) -> None:
        """Tell the dispatcher of a death, as a closed connection does; half of them are left to the heartbeat."""
        if self.random.random() < 0.5:
            self.at(self.random.uniform(0, 0.2), lambda: self.dispatcher.leave(name, self.now))

    def _arrive(self) -> None:
        """Submit a request, and the next one after a while."""
        if self.now > SECONDS:
            return
        draw = self.random
        tokens = [*draw.choice(self.stems), *(draw.randrange(600) for _ in range(draw.randint(1, 40)))]
        if draw.random() < 0.003:
            tokens[:1] = [POISON, len(self.clients)]
        name = draw.choice((None, None, "a", "b", "c"))
        params = SamplingParams(
            max_tokens=draw.randint(1, 60),
            seed=draw.choice((None, 7)),
            prompt_logprobs=draw.choice((None, None, 0)),
        )
        submits: list[Submit] = []
        for _ in range(draw.choice((1, 1, 1, 2))):
            submit = Submit(len(self.clients) + len(submits), array("i", tokens), params, adapter=name)
            submits.append(replace(submit, params=replace(params, seed=draw.randrange(1 << 30))))
        try:
            self.dispatcher.submit(submits, self.now)
        except CapacityError:
            self.counts["refused"] += len(submits)
        else:
            version = None if name is None else self.versions.get(name, name)
            self.clients |= {submit.id: Client(submit, version) for submit in submits}
            if draw.random() < 0.1:
                ids = tuple(submit.id for submit in submits)
                self.at(draw.uniform(0, 4), lambda: self.dispatcher.abort(ids))
        self.at(draw.expovariate(2.0 if draw.random() < 0.9 else 40.0), self._arrive)

    def _tick(self) -> None:
        """Heartbeats, autoscaling and draining, twice a second."""
        if not self._busy:
            return
        self.dispatcher.tick(self.now)
        known = self.dispatcher.replicas
        serving = [info for info in known.values() if not info.draining]
        load = FleetLoad(self.dispatcher.num_open, 3.0 * bool(self.dispatcher.num_held), len(serving) + self.starting)
        wanted, self.scale = self.policy.decide(load, self.scale, self.now)
        assert self.policy.least <= wanted <= self.policy.most
        for _ in range(wanted - load.replicas):
            self._start()
        if wanted < load.replicas and serving:
            name = self.random.choice(serving).name
            self.dispatcher.drain(name)
            self.at(self.random.uniform(0, 8), lambda: self.dispatcher.hand_over(name, self.now))
            self.counts["drained"] += 1
        for info in [info for info in known.values() if info.draining and self.dispatcher.is_drained(info.name)]:
            if not self.dispatcher.hands_sessions_over(info.name):
                self.dispatcher.leave(info.name, self.now)
        self.at(0.5, self._tick)

    def _harm(self) -> None:
        """Do one bad thing, and the next one after a while."""
        if self.now > SECONDS:
            return
        alive = [replica for replica in self.replicas.values() if replica.alive]
        draw = self.random
        what = draw.choice(("kill", "kill", "cut", "freeze", "version", "base"))
        self.counts[what] += 1
        if what == "version":
            name = draw.choice("abc")
            self.versions[name] = f"{name}-{self.counts[what]}"
            self.dispatcher.name_adapter(name, self.versions[name])
        elif what == "base" and len(self.bases) < 3:
            self.bases.append(f"base-{len(self.bases) + 1}")
            for info in list(self.dispatcher.replicas.values()):
                self.dispatcher.drain(info.name)
            self._start()
        elif alive:
            victim = draw.choice(alive)
            if what == "kill":
                self._kill(victim.name)
            elif what == "cut":
                victim.cut_until = self.now + draw.uniform(0.1, 8)
            else:
                victim.frozen_until = self.now + draw.uniform(0.1, 8)
        self.at(draw.expovariate(1 / 8), self._harm)


def simulate(seed: int) -> Counter[str]:
    """Run one seed; returns what happened. AssertionError, with the seed, for a violated invariant."""
    simulation = Simulation(seed)
    try:
        return simulation.run()
    except Exception as error:
        raise AssertionError(f"seed {seed}, second {simulation.now:.2f}: {error}") from error
