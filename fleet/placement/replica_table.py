"""Replica table: a gateway's data about its replicas, in columns for ``choose_replica``."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...engine.messages import Ready
from .adapter_index import AdapterIndex
from .grammar_index import GrammarIndex
from .prefix_index import PrefixIndex
from .routing import ReplicaColumns, Route, choose_replica, rendezvous

ROW_TOKENS = 64.0
"""Delay of a new sequence by each running one, for as long as both run, in tokens of prefill.

With a smaller number, replicas are loaded less evenly; with a larger one, adapters are loaded more often to even out
the load (``benchmarks/fleet/simulated/routing_cost.py``).
"""

FIRST_RATE = 1000.0
"""Tokens of prefill per second that are assumed before the first measurement."""

COMPILE_SECONDS = 0.25
REPLAY_COMPILE_SECONDS = 1.0
"""Seconds added to the wait at a replica that has to compile the sequence's grammar. They are more for a replayed
sequence, whose client waits for its next token, because the remaining replicas are busy with the sequences of the lost
one."""

GRAMMAR_COPIES = 2
"""Number of replicas that should have a grammar in use. The second one can continue the sequences of the first."""

PREFILL, DECODE, BOTH = "prefill", "decode", "both"

_RATE_WEIGHT = 4096.0  # tokens over which a measured rate is averaged


@dataclass(slots=True)
class ReplicaInfo:
    """One replica.

    Attributes:
        name: unique name, never used for another replica.
        slot: index of the replica in the columns.
        ready: limits of the replica, and the digest of its base model.
        draining: whether it takes no new sequences.
        role: work that the replica does: ``prefill`` for prompts, ``decode`` for answers, or ``both``.
        heard: time of its last sign of life.
        pending: number of tokens to compute before the first token, by sequence.
        rows: number of this gateway's sequences on the replica.
        foreign_rows: number of other gateways' sequences on it, by its last heartbeat.
        rate: measured tokens per second.
        adapters: adapters that it probably holds, the most recently used last.
    """

    name: str
    slot: int
    ready: Ready
    heard: float
    draining: bool = False
    role: str = BOTH
    pending: dict[int, int] = field(default_factory=dict)
    rows: int = 0
    foreign_rows: float = 0.0
    rate: float = FIRST_RATE
    adapters: OrderedDict[str, None] = field(default_factory=OrderedDict)
    stats: Mapping[str, float] = field(default_factory=dict)


class ReplicaTable:
    """Replicas by name, the sequences sent to them, and the choice among them.

    Args:
        most_replicas: largest number of replicas at one time.
        adapter_slots: number of adapters that a replica holds on its device.
        adapter_load_seconds: seconds that the load of an adapter takes.
    """

    def __init__(self, most_replicas: int, adapter_slots: int, adapter_load_seconds: float) -> None:
        self._free = list(range(most_replicas - 1, -1, -1))
        self._names = np.zeros(most_replicas, np.uint64)
        self._open = np.zeros(most_replicas, bool)
        self._heard = np.zeros(most_replicas)
        self._tokens = np.zeros(most_replicas)
        self._rates = np.full(most_replicas, FIRST_RATE)
        self._by_slot: dict[int, ReplicaInfo] = {}
        self.prefixes = PrefixIndex(most_replicas)
        self.grammars = GrammarIndex(most_replicas)
        self._adapters = AdapterIndex(most_replicas, adapter_slots, adapter_load_seconds)
        self.replicas: dict[str, ReplicaInfo] = {}

    def join(self, name: str, ready: Ready, now: float, role: str = BOTH) -> ReplicaInfo:
        """Add a replica. Raises ValueError if the name is in use, IndexError if there are too many replicas."""
        if name in self.replicas:
            raise ValueError(f"replica {name} is there already")
        info = ReplicaInfo(name, self._free.pop(), ready, now, role=role)
        self.replicas[name] = self._by_slot[info.slot] = info
        self._names[info.slot] = hash_of(name)
        self._open[info.slot], self._tokens[info.slot], self._rates[info.slot] = True, 0.0, info.rate
        self._adapters.open(info.slot)
        self.prefixes.open(info.slot, ready.num_pages * ready.page_size)
        self.grammars.open(info.slot)
        self.hear(info, now)
        return info

    def hear(self, info: ReplicaInfo, now: float) -> None:
        """Record a sign of life."""
        info.heard = self._heard[info.slot] = max(info.heard, now)

    def leave(self, name: str) -> None:
        """Remove a replica."""
        info = self.replicas.pop(name)
        del self._by_slot[info.slot]
        self._open[info.slot] = False
        self._adapters.close(info.slot, info.adapters)
        self.prefixes.close(info.slot)
        self.grammars.close(info.slot)
        self._free.append(info.slot)

    def drain(self, name: str) -> None:
        """Close a replica for new sequences."""
        info = self.replicas[name]
        info.draining = True
        self._open[info.slot] = False

    def reopen(self, name: str) -> None:
        """Open a replica for new sequences again."""
        info = self.replicas[name]
        info.draining = False
        self._open[info.slot] = True

    @property
    def queue_seconds(self) -> float:
        """Seconds to compute all waiting prompts on the replica with the shortest queue; 0 without a replica."""
        waits = (sum(info.pending.values()) / info.rate for info in self.replicas.values() if not info.draining)
        return min(waits, default=0.0)

    def choose(
        self,
        chain: Sequence[int],
        num_tokens: int,
        *,
        adapter: str | None = None,
        grammar: int = 0,
        base_digest: str = "",
        heard_since: float = -np.inf,
        excluded: Container[str] = (),
        is_replay: bool = False,
    ) -> tuple[ReplicaInfo | None, Route]:
        """Return the replica for a sequence, None if there is none; see ``choose_replica``.

        Args:
            grammar: key of the grammar; 0 for none.
            base_digest: digest of the base model that the replica must have, "" for any.
            heard_since: time; replicas without a later sign of life are chosen only if there are no others.
            excluded: names of replicas that must not be chosen.
            is_replay: whether a client waits for the next token of the sequence, which is then sent where its adapter
                is already loaded rather than where the adapter should be loaded next.
        """
        cached, deepest = self.prefixes.cached(chain)
        is_open = self._open
        if base_digest or excluded:
            is_open = is_open.copy()
            for info in self.replicas.values():
                if info.name in excluded or base_digest not in ("", info.ready.base_digest):
                    is_open[info.slot] = False
        if (speaking := is_open & (self._heard >= heard_since)).any():
            is_open = speaking
        rate = float(self._rates[is_open].mean()) if is_open.any() else FIRST_RATE
        wait = self._tokens * (rate / self._rates)
        if grammar:
            seconds = REPLAY_COMPILE_SECONDS if is_replay else COMPILE_SECONDS
            wait = wait + np.where(self.grammars.holders(grammar), 0.0, seconds * rate)
        columns = ReplicaColumns(self._names, is_open, wait)
        adapters = self._adapters.columns(adapter, rate, self._open, is_replay=is_replay)
        route = choose_replica(chain, num_tokens, cached, deepest, columns, adapters)
        return self._by_slot.get(route.replica), route

    def without(self, role: str) -> frozenset[str]:
        """Return the replicas that do not do the work of a role; empty if no other replica takes sequences."""
        names = frozenset(info.name for info in self.replicas.values() if info.role not in (role, BOTH))
        has_others = any(not info.draining and info.name not in names for info in self.replicas.values())
        return names if has_others else frozenset()

    def num_decoding(self, chain: Sequence[int]) -> int:
        """Return how many of a prompt's tokens are cached on replicas that can compute its answer."""
        cached, _ = self.prefixes.cached(chain)
        open_ones = (info for info in self.replicas.values() if info.role != PREFILL and not info.draining)
        return max((int(cached[info.slot]) for info in open_ones), default=0)

    def holder(self, chain: Sequence[int], info: ReplicaInfo, heard_since: float) -> tuple[ReplicaInfo | None, int]:
        """Return another replica with the same base model that holds the most tokens of a prompt, and their number.

        Returns None and 0 if no replica holds any. Draining replicas are considered too; replicas without a sign of
        life since ``heard_since`` are not.
        """
        cached, _ = self.prefixes.cached(chain)
        others = [
            (int(cached[each.slot]), each)
            for each in self.replicas.values()
            if each is not info and each.heard >= heard_since and each.ready.base_digest == info.ready.base_digest
        ]
        num_tokens, best = max(others, key=lambda each: each[0], default=(0, None))
        return (best, num_tokens) if num_tokens else (None, 0)

    def standby(self, grammar: int, base_digest: str) -> ReplicaInfo | None:
        """Return a replica that should compile a grammar in advance, to be able to continue sequences of another one.

        None if ``GRAMMAR_COPIES`` replicas have the grammar, or there is no other replica.

        Args:
            grammar: key of the grammar.
            base_digest: digest of the base model that the replica must have, "" for any.
        """
        holders = self.grammars.holders(grammar)
        if int((holders & self._open).sum()) >= GRAMMAR_COPIES:
            return None
        others = self._open & ~holders
        for info in self.replicas.values() if base_digest else ():
            others[info.slot] &= info.ready.base_digest == base_digest
        if not others.any():
            return None
        ranks = np.where(others, rendezvous(grammar, self._names), np.uint64(0))
        return self._by_slot[int(ranks.argmax())]

    def place(
        self,
        info: ReplicaInfo,
        number: int,
        chain: Sequence[int],
        num_new: int,
        adapter: str | None,
        grammar: int = 0,
    ) -> None:
        """Record that a sequence was sent to a replica, which computes ``num_new`` tokens before it draws one."""
        info.pending[number] = num_new
        info.rows += 1
        self.prefixes.add(info.slot, chain)
        if adapter is not None:
            self._adapters.use(info.slot, info.adapters, adapter)
        if grammar:
            self.grammars.add(info.slot, grammar)
        self._adapters.count(info.slot, adapter)
        self._weigh(info)

    def begun(self, info: ReplicaInfo, number: int) -> None:
        """Record the first token of a sequence."""
        if info.pending.pop(number, None) is not None:
            self._weigh(info)

    def ended(self, info: ReplicaInfo, number: int) -> None:
        """Record the end of a sequence."""
        info.pending.pop(number, None)
        info.rows -= 1
        self._weigh(info)

    def beat(self, info: ReplicaInfo, stats: Mapping[str, float]) -> None:
        """Update speed and other gateways' sequences from the numbers of a heartbeat."""
        tokens = stats.get("computed_tokens", 0.0) - info.stats.get("computed_tokens", 0.0)
        seconds = stats.get("seconds_step", 0.0) - info.stats.get("seconds_step", 0.0)
        if tokens > 0 and seconds > 0:
            weight = min(1.0, tokens / _RATE_WEIGHT)
            info.rate += weight * (tokens / seconds - info.rate)
            self._rates[info.slot] = info.rate
        info.foreign_rows = max(0.0, stats.get("running", 0.0) + stats.get("waiting", 0.0) - info.rows)
        info.stats = stats
        self._weigh(info)

    def _weigh(self, info: ReplicaInfo) -> None:
        rows = info.rows + info.foreign_rows
        self._tokens[info.slot] = sum(info.pending.values()) + ROW_TOKENS * rows


def hash_of(name: str) -> int:
    """Return a 64-bit hash of a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
