"""A fleet of engine cores over fake devices, all of whose KV moves: between small pools, tiers that fail, and replicas.

Replicas are lost, drain and come; blocks on their way are lost, damaged, repeated or sent to others. A cell of a fake
pool depends on all tokens before it, so one wrong page anywhere is a wrong token.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.kv_cache.block_codec import BlockCodec
from rootgraft.engine.kv_cache.peer_reads import PeerReads
from rootgraft.engine.messages import (
    CachedPrefixes,
    Done,
    Failed,
    Heartbeat,
    KvBlocks,
    Message,
    Submit,
    TokenOut,
    decode,
    encode,
)
from rootgraft.engine.types import FinishReason, SamplingParams
from rootgraft.fleet.dispatcher import Dispatcher, DispatcherLimits
from support.engine.core_hooks import set_tiers
from support.engine.fake_worker import FakeWorker, expected_tokens
from support.engine.faulty_files import cramped_tiers

VOCAB, PAGE = 7, 4
ROLES = (("both",), ("prefill", "decode"), ("prefill", "decode", "both"))
LIMITS = DispatcherLimits(
    most_replicas=8, heartbeat_seconds=60.0, quiet_seconds=0.5, least_fetched=16, least_prefill=24, most_transfers=3
)
TICK = 0.05  # seconds of a round


@dataclass
class Replica:
    """An engine core and what is on its way to and from it."""

    core: EngineCore
    inbox: list[Message] = field(default_factory=list)
    num_frames: int = 0


class CrampedFleet:
    """One seed.

    Args:
        folder: for files of KV.

    Attributes:
        counts: what happened.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw = random.Random(seed)
        self.dispatcher = Dispatcher(LIMITS, seed)
        self.folder = folder
        self.now = 0.0
        self.roles = self.draw.choice(ROLES)
        self.fault_rate = self.draw.choice((0.0, 0.05, 0.2))
        self.replicas: dict[str, Replica] = {}
        self.asked: dict[int, Submit] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Done | Failed] = {}
        self.counts: Counter[str] = Counter()
        self.stems = [[self.draw.randrange(VOCAB) for _ in range(self.draw.choice((70, 100, 150)))] for _ in range(4)]
        for _ in range(self.draw.randint(2, 3)):
            self.start()

    def run(self, num_requests: int) -> Counter[str]:
        """Ask and answer so many requests. AssertionError for a wrong token, a lost request or broken books."""
        rounds = 0
        while len(self.ends) < num_requests:
            if len(self.asked) < num_requests and len(self.asked) - len(self.ends) < 16 and self.draw.random() < 0.5:
                self.ask()
            self.harm()
            self.turn()
            rounds += 1
            assert rounds < 400 * num_requests, "it does not come to an end"
        for number, submit in self.asked.items():
            end = self.ends[number]
            assert isinstance(end, Done) and end.reason is FinishReason.LENGTH, end
            expected = expected_tokens(submit.tokens, submit.params.max_tokens, VOCAB)
            assert self.tokens[number] == expected, f"request {number} has wrong tokens"
        self.counts["requests"] += num_requests
        for name in tuple(self.replicas):
            self.stop(name)
        return self.counts

    def start(self) -> None:
        """Add a replica with a small pool, and tiers that fail."""
        name = f"r{self.counts['started']}"
        self.counts["started"] += 1
        worker = FakeWorker(self.draw.choice((70, 120)), PAGE, vocab_size=VOCAB, overlaps=self.draw.random() < 0.5)
        config = EngineConfig(
            block_size=PAGE,
            max_num_seqs=self.draw.choice((2, 4)),
            max_num_batched_tokens=self.draw.choice((16, 48)),
            kv_peer_gib=0.001,
            target_itl_ms="0",
        )
        core = EngineCore(config, worker)
        tiers = cramped_tiers(
            {"block_size": PAGE},
            worker.kv_pages,
            self.folder / name,
            self.draw,
            rate=self.fault_rate,
            host_pages=self.draw.choice((0, 3)),
            disk_pages=self.draw.choice((0, 12, 60)),
            inline=True,
        )
        # On the clock of the test: an answer that is lost is waited for until its time has passed.
        codec, capacity = BlockCodec(tiers.scheme), self.draw.choice((5, 40, 400)) * tiers.scheme.page_bytes
        tiers.peers = PeerReads(codec, capacity, lambda: self.now)
        set_tiers(core, tiers)
        self.replicas[name] = Replica(core)
        self.dispatcher.join(name, core.ready, self.now, role=self.draw.choice(self.roles))

    def stop(self, name: str) -> None:
        """End a replica as a killed process ends."""
        replica = self.replicas.pop(name)
        stats = replica.core.stats()
        for key in ("kv_hits_peer", "kv_hits_disk", "kv_hits_host", "kv_errors_disk", "kv_rejected_disk"):
            self.counts[key] += int(stats.get(key, 0))
        replica.core.close()

    def ask(self) -> None:
        number = len(self.asked)
        tokens = [*self.draw.choice(self.stems), *(self.draw.randrange(VOCAB) for _ in range(self.draw.randint(1, 30)))]
        salt, tenant = self.draw.choice(("", "", "", "", "s")), self.draw.choice(("", "", "", "", "t"))
        params = SamplingParams(max_tokens=self.draw.choice((1, 3, 12, 40)))
        session = self.draw.choice(("", "one", "two", "three"))
        submit = Submit(number, array("i", tokens), params, salt=salt, cache_tenant=tenant, session=session)
        self.asked[number] = submit
        self.dispatcher.submit([submit], self.now)

    def harm(self) -> None:
        """Lose, drain or add a replica, now and then."""
        if self.draw.random() >= 0.08:
            return
        open_ones = [info.name for info in self.dispatcher.replicas.values() if not info.draining]
        what = self.draw.choice(("kill", "drain", "drain", "start", "start", "start", "reset"))
        if what == "start" and len(self.replicas) < 5:
            self.start()
        elif what == "reset" and self.replicas:
            self.draw.choice(list(self.replicas.values())).core.reset_cache()
        elif len(open_ones) > 1:
            name = self.draw.choice(open_ones)
            if what == "kill" and not self.dispatcher.num_interrupted:
                self.dispatcher.leave(name, self.now)
            elif what == "drain":
                self.dispatcher.drain(name)
                self.dispatcher.hand_over(name, self.now)
        self.counts[what] += 1

    def turn(self) -> None:
        """Carry messages, and let each replica compute a step."""
        self.now += TICK
        self.dispatcher.tick(self.now)
        for name in self.dispatcher.take_lost():
            self.stop(name)
        for name, message in self.dispatcher.take_sent():
            if name in self.replicas:
                self.replicas[name].inbox += self.carried(message)
        for name, replica in tuple(self.replicas.items()):
            if replica.inbox:
                messages, replica.inbox = replica.inbox, []
                replica.core.handle(decode(encode(messages)))
            out = decode(encode(replica.core.step())) if replica.core.has_work else []
            replica.core.check()
            waiting = replica.core.waiting
            self.counts["prefixes listed"] += sum(
                len(each.prefixes) for each in out if isinstance(each, CachedPrefixes)
            )
            stats = replica.core.stats()
            self.dispatcher.take(name, replica.num_frames, [*out, Heartbeat(stats, {}, ((), ()), waiting)], self.now)
            replica.num_frames += 1
        for info in tuple(self.dispatcher.replicas.values()):
            is_empty = info.draining and self.dispatcher.is_drained(info.name)
            if is_empty and not self.dispatcher.hands_sessions_over(info.name):
                self.dispatcher.retire(info.name, self.now)
                self.stop(info.name)
        self.dispatcher.check()
        for said in self.dispatcher.take_delivered():
            if isinstance(said, TokenOut):
                self.tokens.setdefault(said.id, []).extend(said.tokens)
            elif isinstance(said, (Done, Failed)):
                assert said.id not in self.ends
                self.ends[said.id] = said

    def carried(self, message: Message) -> list[Message]:
        """Return what arrives of a message: of blocks sometimes less, more or others."""
        if not isinstance(message, KvBlocks) or self.draw.random() >= self.fault_rate:
            return [message]
        fault = self.draw.choice(("lost", "damaged", "cut", "twice", "short"))
        self.counts[f"blocks {fault}"] += 1
        if fault == "lost":
            return []
        if fault == "twice":
            return [message, message]
        if fault == "short":
            return [KvBlocks(message.id, message.blocks[: len(message.blocks) // 2], message.is_last)]
        return [KvBlocks(message.id, tuple(map(self._changed, message.blocks)), message.is_last)]

    def _changed(self, block: bytes) -> bytes:
        data = bytearray(block)
        data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        return bytes(data) if self.draw.random() < 0.7 else bytes(data[: self.draw.randrange(len(data))])
