"""Dispatcher: sends each sequence to a replica, and if that is lost, to another one. Does no I/O and reads no clock.

    submit, abort ------>|            |----> ``take_sent``       messages for replicas
    join, drain, leave ->| Dispatcher |----> ``take_delivered``  messages for clients
    take, tick --------->|            |----> ``take_lost``       replicas that were given up

For every sequence that ``submit`` accepts, exactly one ``Done`` or ``Failed`` is delivered, and before it exactly the
tokens that one undisturbed replica would have sent.

*Quarantine*: a sequence that crashes replicas must not harm other sequences. If a sequence was on two lost replicas in
a row and got no token in between, it continues on a replica that has no other such sequence and gets no new sequences
meanwhile. After a third loss the sequence fails. A sequence that was on the lost replicas only by chance gets a token
and thereby leaves quarantine. Losses do not count for sequences that were in a replica's queue. They do not count for
sequences that waited for a grammar either, unless no answer has begun under that grammar yet, because then its
compilation may be the cause.

*Losses of a whole machine*: if several replicas are lost at almost the same time, a sequence would move from one lost
replica to the next, and all of the losses would count against it. Therefore a sequence that loses a second replica
within ``quiet_seconds``, or is in quarantine, waits until no replica was lost for that long. It continues on a replica
that has given a sign of life since the last loss.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..engine.errors import AdapterUnavailable, CapacityError, EngineDead
from ..engine.messages import (
    Abort,
    AdapterChanged,
    CachedPrefixes,
    Done,
    Failed,
    FetchKv,
    ForgetTokens,
    Heartbeat,
    KvBlocks,
    Message,
    PrepareGrammar,
    ReadKv,
    Ready,
    Submit,
    TokenOut,
    TokenTexts,
    failure_of,
)
from ..engine.types import KvPrefix, Priority
from ..engine.weighted_adapters import names_in, renamed
from .frame_order import FrameGap, FrameOrder
from .journal import Journal, JournalEntry, aborted, given_up, is_loss
from .kv_handover import PlannedCopy
from .placement.grammar_index import grammar_key
from .placement.prefix_chain import BLOCK, KvScope, prefix_chain
from .placement.replica_table import BOTH, DECODE, PREFILL, ReplicaInfo, ReplicaTable
from .placement.routing import Route
from .transfer_table import TransferTable

MOST_DEATHS = 3
"""Number of replicas lost in a row, while a sequence was there and got no token, at which the sequence fails."""

MOST_REPLAYS = 16
"""Number of all replicas lost while a sequence was there, with or without a token, beyond which it fails."""

SUSPECT_DEATHS = 2
"""Number of replicas lost in a row, without a token in between, from which on a sequence is in quarantine."""


@dataclass(frozen=True, slots=True)
class DispatcherLimits:
    """Bounds of a dispatcher.

    Attributes:
        most_replicas: largest number of replicas at one time.
        most_bytes: largest size of the journal in bytes.
        most_held: largest number of sequences that wait for a replica while there is none.
        hold_seconds: largest number of seconds for which such a sequence waits.
        heartbeat_seconds: seconds without a sign of life after which a replica counts as lost.
        quiet_seconds: seconds within which losses count as losses of one moment, such as those of a whole machine.
        adapter_slots: number of adapters that a replica holds on its device.
        adapter_load_seconds: seconds that the load of an adapter takes.
        most_transfers: largest number of copies of KV between replicas at one time. If it is reached, KV is computed
            instead.
        least_fetched: number of tokens of a prompt that another replica must hold in addition to the tokens that the
            chosen replica holds, so that their KV is copied.
        least_prefill: least number of missing prompt tokens for which a replica with the role ``prefill`` is used.
    """

    most_replicas: int = 64
    most_bytes: int = 1 << 30
    most_held: int = 1024
    hold_seconds: float = 60.0
    heartbeat_seconds: float = 3.0
    quiet_seconds: float = 1.0
    adapter_slots: int = 4
    adapter_load_seconds: float = 0.5
    most_transfers: int = 16
    least_fetched: int = 128
    least_prefill: int = 256

    @property
    def silent_seconds(self) -> float:
        """Seconds without a sign of life after which a replica gets new sequences only if there is no other one."""
        return self.heartbeat_seconds / 2


@dataclass(slots=True)
class LostReplicas:
    """Replicas that a dispatcher has given up.

    Attributes:
        names: names of the lost replicas that ``take_lost`` has not returned yet.
        last: time of the last loss.
        count: number of all losses.
    """

    names: list[str] = field(default_factory=list)
    last: float = -math.inf
    count: int = 0


@dataclass(slots=True)
class DispatcherOutbox:
    """Messages that were not collected yet: for replicas, with their names, and for clients."""

    sent: list[tuple[str, Message]] = field(default_factory=list)
    delivered: list[Message] = field(default_factory=list)


class Dispatcher:
    """All sequences and replicas of one model that one gateway knows.

    Args:
        seed: seed of the generator that draws seeds for requests without one.

    Attributes:
        num_replays: number of sequences that continued on another replica.
    """

    def __init__(self, limits: DispatcherLimits, seed: int = 0) -> None:
        self._limits = limits
        self._journal = Journal(limits.most_bytes)
        self._table = ReplicaTable(limits.most_replicas, limits.adapter_slots, limits.adapter_load_seconds)
        self._orders: dict[str, FrameOrder[Sequence[Message]]] = {}
        # Sequences that are held back, with the time since when.
        self._held: dict[int, tuple[JournalEntry, float]] = {}
        self._suspects: dict[str, JournalEntry] = {}  # by replica
        self._lacking: dict[str, set[str]] = {}  # replicas that cannot have an adapter, by its name
        self._versions: dict[str, str] = {}
        self._base_digest = ""
        self._texts: dict[str, TokenTexts] = {}  # by vocabulary
        # Seeds for sequences without one are drawn here, so that a replay on another replica draws the same tokens.
        self._seeds = random.Random(seed % (1 << 64))
        self._out = DispatcherOutbox()
        self._transfers = TransferTable(limits.most_transfers)
        self._lost = LostReplicas()
        self.num_replays = 0

    @property
    def num_lost(self) -> int:
        """Number of lost replicas."""
        return self._lost.count

    @property
    def replicas(self) -> Mapping[str, ReplicaInfo]:
        return self._table.replicas

    @property
    def num_open(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._journal)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_interrupted(self) -> int:
        """Number of sequences that have no token since their replica was lost. Linear in the open sequences."""
        return sum(entry.losses.in_a_row > 0 for entry in self._journal)

    @property
    def queue_seconds(self) -> float:
        """Seconds that a new sequence waits for earlier prompts on the fastest replica; 0 without a replica."""
        return self._table.queue_seconds

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the journal has reserved."""
        return self._journal.num_bytes

    def describe_tokens(self, message: TokenTexts | ForgetTokens) -> None:
        """Send the bytes of a vocabulary's tokens, or a request to forget them, to all present and future replicas."""
        self._texts.pop(message.vocabulary, None)
        if isinstance(message, TokenTexts):
            self._texts[message.vocabulary] = message
        self._out.sent += [(name, message) for name in self.replicas]

    def name_adapter(self, name: str, version: str | None) -> None:
        """Make an adapter's name refer to a version from now on, None for itself. Open sequences keep their version."""
        self._out.delivered.append(AdapterChanged(name, None))
        if version is None:
            self._versions.pop(name, None)
        else:
            self._versions[name] = version

    def submit(self, submits: Iterable[Submit], now: float) -> None:
        """Accept sequences and send them to replicas.

        Raises:
            CapacityError: the journal has no room, or too many sequences wait for a replica. No sequence is accepted.
        """
        entries: list[JournalEntry] = []
        try:
            for submit in submits:
                entries.append(self._journal.open(self._complete(submit)))
            is_full = len(self._held) + len(entries) > self._limits.most_held
            if is_full and all(info.draining for info in self.replicas.values()):
                raise CapacityError(f"No replica is ready, and {len(self._held)} requests are already waiting for one.")
        except BaseException:
            for entry in entries:
                self._journal.close(entry)
            raise
        for entry in entries:
            entry.grammar = grammar_key(entry.submit.grammar)
            self._place(entry, now)

    def abort(self, ids: Iterable[int]) -> None:
        """End sequences; numbers of sequences that are not open are ignored."""
        for number in ids:
            entry = self._journal.get(number)
            if entry is None or entry.aborted:
                continue
            entry.aborted = True
            if entry.replica is not None:
                self._out.sent.append((entry.replica, Abort((entry.number,))))
            else:
                self._end(entry, aborted(entry))

    def join(self, name: str, ready: Ready, now: float, lacking: Iterable[str] = (), role: str = BOTH) -> None:
        """Add a replica, and send it the sequences that wait for a replica.

        Args:
            name: name of the replica; it must never have been used for another one.
            lacking: versions of adapters that the replica cannot load; it gets no sequences of these.
            role: work that the replica does, as in ``ReplicaInfo``.
        """
        for version in lacking:
            self._lacking.setdefault(version, set()).add(name)
        self._table.join(name, ready, now, role)
        # The digest of the base model for new sequences, if it is known.
        self._base_digest = ready.base_digest
        self._orders[name] = FrameOrder()
        self._out.sent += [(name, texts) for texts in self._texts.values()]
        self._warm(name, ready.base_digest)
        self._place_held(now)
        self._prepare_grammars()

    def drain(self, name: str) -> None:
        """Send a replica no new sequences; its present sequences end there."""
        if name in self.replicas:
            self._table.drain(name)

    def reopen(self, name: str, now: float) -> None:
        """Send new sequences again to a replica that was draining."""
        if name in self.replicas:
            self._table.reopen(name)
            self._transfers.handover.reopen(name)
            self._place_held(now)

    def is_drained(self, name: str) -> bool:
        """Return whether a replica has no sequence, and no copy of its KV is planned or running. Linear time."""
        if self._journal.on(name) or self._transfers.reads_from(name):
            return False
        copying = (each for each in self._journal if each.kv.source == name and each.replica is not None)
        return not any(each.number in self.replicas[str(each.replica)].pending for each in copying)

    def hands_sessions_over(self, name: str) -> bool:
        """Copy the KV of a drained replica's sessions to the remaining ones. Returns whether copies are in progress."""
        stays = any(not each.draining for each in self.replicas.values())
        if stays and self._transfers.handover.begin_drain(name):
            self._out.sent.append((name, self._transfers.handover.ask(name)))
        return self._transfers.handover.uses(name) or self._transfers.reads_from(name)

    def hand_over(self, name: str, now: float) -> None:
        """Move the sequences of a draining replica to other replicas, while their KV can still be copied from it.

        Sequences that no other replica can continue at present stay on the replica.
        """
        info = self.replicas.get(name)
        if info is None or not info.draining:
            return
        base_digest = info.ready.base_digest
        for entry in self._journal.on(name):
            lacking = {*self._suspects, *self._without(entry.submit.adapter)}
            others = (each for each in self.replicas.values() if not each.draining and each.name not in lacking)
            if any(each.ready.base_digest == base_digest for each in others) and not entry.aborted:
                entry.kv.decoder = ""
                self.num_replays += 1
                self._move(entry, now)

    def leave(self, name: str, now: float) -> None:
        """Give up a replica; its sequences continue elsewhere. Ignored if the replica is not known."""
        if name in self.replicas:
            self._leave([name], now)

    def _leave(self, names: Sequence[str], now: float) -> None:
        """Give up several replicas at once, so that none gets the sequences of another."""
        self._lost.names += names
        self._lost.last = now
        self._lost.count += len(names)
        for entry in [entry for name in names for entry in self._remove(name)]:
            entry.losses.is_careful = now - entry.losses.last < self._limits.quiet_seconds
            entry.losses.last = now
            self._replay(entry, now)
        self._place_held(now)
        self._prepare_grammars()

    def retire(self, name: str, now: float) -> None:
        """Remove a replica that is no longer needed. Its remaining sequences continue elsewhere, without blame."""
        for entry in self._remove(name):
            entry.is_late = True
            self._replay(entry, now)
        self._place_held(now)

    def _remove(self, name: str) -> list[JournalEntry]:
        """Forget a replica. Returns the sequences that it had."""
        self._table.leave(name)
        del self._orders[name]
        self._out.sent += self._transfers.leave(name)
        self._suspects.pop(name, None)
        self._lacking = {version: left for version, names in self._lacking.items() if (left := names - {name})}
        return self._journal.lift(name)

    def take(self, name: str, number: int, messages: Sequence[Message], now: float) -> None:
        """Process a frame of a replica; frames may arrive in any order. Frames of unknown replicas are ignored."""
        if (info := self.replicas.get(name)) is None:
            return
        self._table.hear(info, now)
        try:
            due = self._orders[name].feed(number, messages)
        except FrameGap:
            self.leave(name, now)
            return
        for frame in due:
            for message in frame:
                if name in self.replicas:
                    self._take(info, message, now)
        if info.role == PREFILL and name in self.replicas:
            self._hand_on(info, now)

    def hear(self, name: str, now: float) -> None:
        """Record a sign of life of a replica other than a frame."""
        if name in self.replicas:
            self._table.hear(self.replicas[name], now)

    def uses_adapter(self, version: str) -> bool:
        """Return whether an open sequence uses a version of an adapter."""
        return self._journal.uses_adapter(version)

    def tick(self, now: float) -> None:
        """Give up replicas without a sign of life, and sequences that have waited too long for a replica."""
        silent = [info.name for info in self.replicas.values() if now - info.heard > self._limits.heartbeat_seconds]
        if silent:
            self._leave(silent, now)
        self._begin_copies()
        for entry, since in tuple(self._held.values()):
            if now - since > self._limits.hold_seconds:
                self._end(entry, failure_of(entry.submit.id, EngineDead("No replica could take this request.")))
        self._place_held(now)

    def take_sent(self) -> list[tuple[str, Message]]:
        """Return messages for replicas since the last call, with the replicas' names."""
        sent, self._out.sent = self._out.sent, []
        return sent

    def take_delivered(self) -> list[Message]:
        """Return messages for clients since the last call."""
        delivered, self._out.delivered = self._out.delivered, []
        return delivered

    def take_lost(self) -> list[str]:
        """Return the replicas that were given up since the last call."""
        lost, self._lost.names = self._lost.names, []
        return lost

    def check(self) -> None:
        """Raise AssertionError if journal, table and quarantine are inconsistent."""
        self._journal.check()
        for info in self.replicas.values():
            entries = self._journal.on(info.name)
            assert info.rows == len(entries) >= len(info.pending), f"{info.name} has {len(entries)} sequences"
            assert sum(entry.losses.in_a_row >= SUSPECT_DEATHS for entry in entries) <= 1, "two suspects on a replica"
        placed = sum(len(self._journal.on(name)) for name in self.replicas)
        assert placed + len(self._held) == len(self._journal), "a sequence is nowhere"

    def _complete(self, submit: Submit) -> Submit:
        """Fix what must be equal on every replica: the seed, and the version that the adapter's name means."""
        seed = self._seeds.getrandbits(63) if submit.params.seed is None else submit.params.seed
        adapter = submit.adapter
        if adapter is not None:
            adapter = renamed(adapter, lambda name: self._versions.get(name, name))
        return replace(submit, params=replace(submit.params, seed=seed), adapter=adapter)

    def _place(self, entry: JournalEntry, now: float) -> bool:
        """Send a sequence to a replica, or hold it while there is none. Returns whether it was sent or has ended."""
        submit = entry.submit
        lacking = self._without(submit.adapter)
        if lacking and all(info.draining or name in lacking for name, info in self.replicas.items()):
            text = "The adapter's files are gone, or have changed since it was loaded: load it again."
            self._end(entry, failure_of(submit.id, AdapterUnavailable(text)))
            return True
        is_suspect = entry.losses.in_a_row >= SUSPECT_DEATHS
        is_careful = is_suspect or entry.losses.is_careful
        if is_careful and now - self._lost.last < self._limits.quiet_seconds:
            self._held.setdefault(submit.id, (entry, now))
            return False
        chain, num_tokens = self._chain(entry), len(submit.tokens) + entry.num_answered
        info, route = self._choose(entry, chain, self._role(entry, chain, num_tokens), now)
        is_silent = info is not None and now - info.heard > self._limits.silent_seconds
        if info is None or (entry.losses.in_all and is_silent) or (is_careful and info.heard <= self._lost.last):
            self._held.setdefault(submit.id, (entry, now))
            return False
        self._held.pop(submit.id, None)
        if is_suspect:
            self._suspects[info.name] = entry
        sent = self._journal.place(entry, info.name, info.ready.base_digest)
        entry.is_late = is_silent
        entry.kv.source, num_cached = self._source(chain, num_tokens, info, route.num_cached, now)
        self._table.place(info, entry.number, chain, num_tokens - num_cached, submit.adapter, entry.grammar)
        self._out.sent.append((info.name, replace(sent, peer_tokens=num_cached) if entry.kv.source else sent))
        if info.role == PREFILL and not entry.generated:
            # The replica reports the exact number later.
            entry.kv.cached = min(num_cached, len(submit.tokens))
            self._push(entry, info, chain, now)
        self._prepare_grammar(entry)
        return True

    def _role(self, entry: JournalEntry, chain: Sequence[int], num_tokens: int) -> str:
        """Return the role that a sequence needs next; a prompt that lacks few tokens runs where it is answered."""
        is_short = num_tokens - self._table.num_decoding(chain) < self._limits.least_prefill
        return DECODE if entry.num_answered or is_short else PREFILL

    def _choose(
        self, entry: JournalEntry, chain: Sequence[int], role: str, now: float
    ) -> tuple[ReplicaInfo | None, Route]:
        """Return the replica for a sequence: preferably the one that was chosen to continue it.

        Replicas of other roles are chosen if there is no replica of the role.
        """
        submit, excluded = entry.submit, {*self._suspects, *self._without(entry.submit.adapter)}
        names = self.replicas.keys()
        wrong = self._table.without(role)
        decoder = self.replicas.get(entry.kv.decoder)
        if role == DECODE and decoder is not None and not decoder.draining and decoder.name not in excluded:
            wrong = frozenset(names - {decoder.name})
        for others in (wrong, frozenset[str]()):
            info, route = self._table.choose(
                chain,
                len(submit.tokens) + entry.num_answered,
                adapter=submit.adapter,
                grammar=entry.grammar,
                base_digest=entry.base_digest,
                heard_since=now - self._limits.silent_seconds,
                excluded=excluded | others,
                is_replay=entry.losses.in_all > 0,
            )
            if info is not None:
                break
        return info, route

    def _push(self, entry: JournalEntry, info: ReplicaInfo, chain: Sequence[int], now: float) -> None:
        """Have the KV of a prompt copied, while it is computed, to the replica that will continue the sequence."""
        decoder, route = self._choose(entry, chain, DECODE, now)
        if decoder is None or decoder.role == PREFILL:
            return
        entry.kv.decoder = decoder.name
        ticket = self._transfers.begin(info.name, decoder.name, 0)
        if ticket is not None:
            entry.kv.push = ticket
            first = route.num_cached // info.ready.page_size
            self._out.sent.append((info.name, ReadKv(ticket, None, array("i"), first, entry.number)))

    def _hand_on(self, info: ReplicaInfo, now: float) -> None:
        """Let sequences whose prompt is computed continue on a replica that computes answers."""
        for entry in self._journal.on(info.name):
            if not entry.generated or entry.aborted or info.name not in self._table.without(DECODE):
                continue
            decoder, _ = self._choose(entry, self._chain(entry), DECODE, now)
            if decoder is not None and decoder.role != PREFILL:
                self._move(entry, now)

    def _move(self, entry: JournalEntry, now: float) -> None:
        """Let a sequence continue on another replica, which copies its KV from the replica that it leaves."""
        assert entry.replica is not None
        info, number = self.replicas[entry.replica], entry.number
        self._journal.move(entry)
        self._acquit(info, entry, now)
        self._table.ended(info, number)
        self._table.prefixes.add(info.slot, self._chain(entry))
        self._out.sent.append((info.name, Abort((number,))))
        self._place(entry, now)

    def _source(
        self, chain: Sequence[int], num_tokens: int, info: ReplicaInfo, num_cached: int, now: float
    ) -> tuple[str, int]:
        """Return the replica that holds more of a prompt, and how many tokens; "" and its own number for none."""
        holder, num_held = self._table.holder(chain, info, now - self._limits.silent_seconds)
        if holder is None or num_held < num_cached + self._limits.least_fetched:
            return "", num_cached
        # The source may also hold a part of the next block, whose size is not known here.
        return holder.name, min(num_held + BLOCK - 1, num_tokens)

    def _without(self, adapter: str | None) -> Collection[str]:
        """Return the replicas that cannot load an adapter, or an adapter of a combination."""
        if adapter is None or not self._lacking:
            return ()
        return {replica for name in names_in(adapter) for replica in self._lacking.get(name, ())}

    def _prepare_grammars(self) -> None:
        """Have the grammars of all open sequences compiled on as many replicas as should have them."""
        for entry in {entry.grammar: entry for entry in self._journal}.values():
            self._prepare_grammar(entry)

    def _prepare_grammar(self, entry: JournalEntry) -> None:
        """Have a sequence's grammar compiled where a replay would run; its own replica compiles it anyway."""
        if entry.submit.grammar is None:
            return
        standby = self._table.standby(entry.grammar, entry.base_digest)
        if standby is not None:
            self._table.grammars.add(standby.slot, entry.grammar)
            self._out.sent.append(
                (standby.name, PrepareGrammar(*entry.submit.grammar, entry.submit.vocabulary, entry.submit.tenant))
            )

    def _chain(self, entry: JournalEntry) -> tuple[int, ...]:
        """Return the hash chain of a sequence's prompt and the tokens generated so far."""
        submit = entry.submit
        scope = KvScope(entry.base_digest or self._base_digest, submit.adapter, submit.salt, submit.cache_tenant)
        return prefix_chain(scope, submit.tokens + entry.answer)

    def _place_held(self, now: float) -> None:
        for entry, _ in tuple(self._held.values()):
            if not self._place(entry, now) and not entry.losses.in_all and entry.submit.adapter is None:
                # No replica takes new sequences. One with an adapter may wait for a replica that has it.
                return

    def _replay(self, entry: JournalEntry, now: float) -> None:
        """Continue a sequence whose replica was lost, unless it has lost too many."""
        entry.losses.in_a_row += not (entry.is_late or (entry.waits and self._table.grammars.is_proven(entry.grammar)))
        entry.losses.in_all += 1
        if entry.aborted:
            self._end(entry, aborted(entry))
        elif entry.losses.in_a_row >= MOST_DEATHS or entry.losses.in_all > MOST_REPLAYS:
            self._end(entry, given_up(entry, in_a_row=entry.losses.in_a_row >= MOST_DEATHS))
        else:
            self.num_replays += 1
            # The sequence has waited in a queue before, and with its next token suspicion of it ends.
            entry.submit = replace(entry.submit, priority=Priority.REALTIME)
            self._place(entry, now)

    def _end(self, entry: JournalEntry, message: Done | Failed) -> None:
        """End a sequence that is on no replica."""
        self._held.pop(entry.submit.id, None)
        self._journal.close(entry)
        self._out.delivered.append(message)

    def _take(self, info: ReplicaInfo, message: Message, now: float) -> None:
        # Most messages are of this type.
        if isinstance(message, TokenOut):
            if (entry := self._journal.find(info.name, message.id)) is not None:
                self._take_tokens(info, entry, message, now)
        elif isinstance(message, Heartbeat):
            self._table.beat(info, message.stats)
            self._journal.take_waiting(info.name, message.waiting)
        elif isinstance(message, FetchKv):
            self._fetch(info, message)
        elif isinstance(message, KvBlocks):
            self._forward(info, message)
        elif isinstance(message, CachedPrefixes):
            self._plan_copies(message, now)
        elif isinstance(message, (Done, Failed)):
            if (entry := self._journal.find(info.name, message.id)) is not None:
                self._take_end(info, entry, message, now)
            elif isinstance(message, Done):
                self._journal.take_left(info.name, message)

    def _fetch(self, info: ReplicaInfo, message: FetchKv) -> None:
        """Ask the source replica for KV that a sequence waits for, or answer that there is none."""
        entry = self._journal.find(info.name, message.id)
        if entry is not None and self._transfers.adopt(entry.kv.push, info.name, message.id):
            return
        source = entry.kv.source if entry is not None else ""
        ticket = self._transfers.begin(source, info.name, message.id) if source in self.replicas else None
        if ticket is None:
            self._out.sent.append((info.name, KvBlocks(message.id, (), is_last=True)))
        else:
            self._out.sent.append((source, ReadKv(ticket, message.path, message.tokens, message.first)))

    def _forward(self, info: ReplicaInfo, message: KvBlocks) -> None:
        """Send blocks of KV to the replica that has requested them."""
        if (forwarded := self._transfers.forward(info.name, message)) is None:
            return
        self._out.sent.append(forwarded)
        if message.is_last and (copy := self._transfers.handover.end(message.id)) is not None:
            self._table.prefixes.add(self.replicas[copy.target].slot, copy.chain)
            self._begin_copies()

    def _warm(self, name: str, base_digest: str) -> None:
        """Have the hottest prefixes of the replica with the most cached KV copied to a replica that has joined."""
        others = [
            (each.stats.get("pages_cached", 0.0), each.name)
            for each in self.replicas.values()
            if each.name != name and each.ready.base_digest == base_digest
        ]
        num_pages, source = max(others, default=(0.0, ""))
        if num_pages:
            self._out.sent.append((source, self._transfers.handover.ask(source, name)))

    def _plan_copies(self, message: CachedPrefixes, now: float) -> None:
        """Have prefixes copied to the replica that has joined, or to the replicas of their next requests."""
        source, target = self._transfers.handover.answered(message.id) or ("", "")
        if source not in self.replicas:
            return
        for prefix in message.prefixes:
            namespace = prefix.path.namespace
            scope = KvScope(namespace.base, prefix.adapter, namespace.salt, namespace.tenant)
            chain = prefix_chain(scope, prefix.tokens)
            chosen = self.replicas.get(target) or self._next_of(prefix, chain, now)
            if chosen is not None and chosen.name != source:
                self._transfers.handover.plan(PlannedCopy(source, chosen.name, prefix, chain))
        self._begin_copies()

    def _next_of(self, prefix: KvPrefix, chain: Sequence[int], now: float) -> ReplicaInfo | None:
        """Return the replica that gets the next request with a prefix; None without one, or if it has the prefix."""
        info, route = self._table.choose(
            chain,
            len(prefix.tokens),
            adapter=prefix.adapter,
            base_digest=prefix.path.namespace.base,
            heard_since=now - self._limits.silent_seconds,
            excluded=self._without(prefix.adapter),
        )
        return info if route.num_cached <= len(prefix.tokens) - self._limits.least_fetched else None

    def _begin_copies(self) -> None:
        """Begin planned copies, but leave half of the transfers to requests that are waiting."""
        while len(self._transfers) < self._limits.most_transfers // 2 and (copy := self._transfers.handover.take()):
            if (ticket := self._transfers.begin(copy.source, copy.target, 0)) is not None:
                self._transfers.handover.begin(ticket, copy)
                prefix = copy.prefix
                self._out.sent.append((copy.source, ReadKv(ticket, prefix.path, prefix.tokens, prefix.first)))

    def _take_tokens(self, info: ReplicaInfo, entry: JournalEntry, message: TokenOut, now: float) -> None:
        num_generated = len(entry.generated)
        said = self._journal.take_tokens(entry, message, info.ready.base_digest)
        if said is not None:
            self._out.delivered.append(said)
        if len(entry.generated) == num_generated:
            return
        self._table.begun(info, entry.number)
        entry.losses.in_a_row = 0
        entry.losses.last = -math.inf
        if entry.began is None:
            entry.began = now
            self._table.grammars.prove(entry.grammar)
        if self._suspects:
            self._acquit(info, entry, now)

    def _take_end(self, info: ReplicaInfo, entry: JournalEntry, message: Done | Failed, now: float) -> None:
        if is_loss(message):
            self.leave(info.name, now)
            return
        number = entry.number
        self._out.delivered.append(self._journal.take_end(entry, message, now))
        self._table.ended(info, number)
        # The next request of the conversation finds the answer in this replica's cache.
        if isinstance(message, Done):
            self._table.prefixes.add(info.slot, self._chain(entry))
        self._acquit(info, entry, now)

    def _acquit(self, info: ReplicaInfo, entry: JournalEntry, now: float) -> None:
        """End the quarantine of a sequence that has got a token, or has ended."""
        if self._suspects.get(info.name) is entry:
            del self._suspects[info.name]
            self._place_held(now)
