"""Journal of sequences: each ``Submit`` and the tokens sent to the client since, so that another replica can go on.

    open --place--> on a replica --take--> tokens, Done or Failed (closed)
      ^                  |
      '------ lift ------'    the replica is lost

On each replica a sequence has another number. What a replica still says about a number that was lifted is not known
here any more, and is dropped: so no token comes twice, and every sequence ends once.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from ..engine.errors import CapacityError, EngineError
from ..engine.messages import Done, Failed, Submit, TokenOut, failure_of
from ..engine.types import FinishReason, Usage
from ..engine.weighted_adapters import names_in

# About the size of an entry without its tokens.
_ENTRY_BYTES = 2048
_TOKEN_BYTES = 4
_LOSSES = ("EngineDead", "EngineError")


@dataclass(slots=True)
class Losses:
    """Losses of the replicas where a sequence was. Written by ``Dispatcher``.

    Attributes:
        in_a_row: replicas lost while it was there and got no token.
        in_all: replicas lost while it was there.
        last: when, without a token since.
        is_careful: two were lost in the same moment: it waits until that is over.
    """

    in_a_row: int = 0
    in_all: int = 0
    last: float = -math.inf
    is_careful: bool = False


@dataclass(slots=True)
class KvPlan:
    """Where KV of a sequence is beside its replica. Written by ``Dispatcher``.

    Attributes:
        source: another replica that has KV of it; "" for none.
        decoder: replica that goes on with it once its prompt is computed, and gets its KV meanwhile; "" for none.
        push: number of the transfer that brings it there.
        cached: tokens of its prompt that were cached where it was computed; None for what its last replica says.
        moved: whether it was moved from the replica that computed its prompt.
    """

    source: str = ""
    decoder: str = ""
    push: int = 0
    cached: int | None = None
    moved: bool = False


@dataclass(slots=True, eq=False)
class JournalEntry:
    """One sequence. Written by ``Journal``; the priority and the grammar and all from ``aborted`` on by ``Dispatcher``.

    Attributes:
        submit: as it came, with the client's number, its seed and its adapter's version.
        generated: tokens that the client has.
        num_scored: logprobs of the prompt that the client has.
        replica: where it runs; None while it waits for one.
        number: its number there.
        grammar: key of its grammar; 0 for none.
        base_digest: of the model that generated the tokens; "" while there are none.
        skipped: of the next tokens, how many the client has already.
        skipped_scores: the same of the prompt's logprobs.
        aborted: the client does not want it any more.
        losses: of the replicas where it was.
        began: when its first token came; None before that.
        waits: its replica has said that no step computes it: it waits in the queue, or for its grammar.
        is_late: its replica was silent already when it came there: it is not the reason if that is lost.
        kv: where its KV is.
    """

    submit: Submit
    generated: array[int] = field(default_factory=lambda: array("i"))
    num_scored: int = 0
    replica: str | None = None
    number: int = 0
    grammar: int = 0
    base_digest: str = ""
    skipped: int = 0
    skipped_scores: int = 0
    aborted: bool = False
    losses: Losses = field(default_factory=Losses)
    began: float | None = None
    waits: bool = False
    is_late: bool = False
    kv: KvPlan = field(default_factory=KvPlan)

    @property
    def num_bytes(self) -> int:
        """Most memory that it takes until its end."""
        tokens = len(self.submit.tokens) + self.submit.params.max_tokens
        return _ENTRY_BYTES + _TOKEN_BYTES * tokens

    @property
    def usage(self) -> Usage:
        """Tokens for a sequence that no replica ends."""
        return Usage(len(self.submit.tokens), 0, len(self.generated))


class Journal:
    """All open sequences, within a limit on their memory.

    Args:
        most_bytes: of all entries, each counted with as many tokens as it may come to have.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._numbers = itertools.count(1)
        self._entries: dict[int, JournalEntry] = {}
        self._placed: dict[str, dict[int, JournalEntry]] = {}
        self._left: dict[
            tuple[str, int], JournalEntry
        ] = {}  # entries by the earlier replica and number, until they end there
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(self._entries.values())

    def get(self, number: int) -> JournalEntry | None:
        """Return the open sequence of a client's number."""
        return self._entries.get(number)

    def on(self, replica: str) -> list[JournalEntry]:
        """Return the sequences on a replica."""
        return list(self._placed.get(replica, {}).values())

    def uses_adapter(self, version: str) -> bool:
        """Return whether an open sequence has an adapter, alone or among others. Linear in their number."""
        asked = (entry.submit.adapter for entry in self._entries.values())
        return any(adapter is not None and version in names_in(adapter) for adapter in asked)

    def open(self, submit: Submit) -> JournalEntry:
        """Begin a sequence. CapacityError if the journal is full, ValueError for a number that is open."""
        if submit.id in self._entries:
            raise ValueError(f"sequence {submit.id} is open already")
        entry = JournalEntry(submit)
        if self.num_bytes + entry.num_bytes > self._most_bytes:
            raise CapacityError(f"The server holds as many requests as its journal has room for ({len(self)}).")
        self.num_bytes += entry.num_bytes
        self._entries[submit.id] = entry
        return entry

    def place(self, entry: JournalEntry, replica: str, base_digest: str) -> Submit:
        """Assign a sequence to a replica. Returns what to send there: it goes on after the client's tokens.

        ValueError if it has tokens of another base model.
        """
        if entry.base_digest not in ("", base_digest):
            raise ValueError(f"tokens of base model {entry.base_digest} cannot go on with {base_digest}")
        entry.replica, entry.number, entry.waits = replica, next(self._numbers), False
        self._placed.setdefault(replica, {})[entry.number] = entry
        # A replica draws at least one token: who has all tokens, but no end, gets the last one again.
        sent = entry.generated[: entry.submit.params.max_tokens - 1]
        entry.skipped = len(entry.generated) - len(sent)
        entry.skipped_scores = 0 if sent else entry.num_scored
        return replace(entry.submit, id=entry.number, generated=sent)

    def lift(self, replica: str) -> list[JournalEntry]:
        """Take all sequences from a replica, in the order in which they came there."""
        entries = list(self._placed.pop(replica, {}).values())
        for entry in entries:
            entry.replica = None
        for place in [place for place in self._left if place[0] == replica]:
            del self._left[place]
        return entries

    def move(self, entry: JournalEntry) -> None:
        """Take one sequence from its replica."""
        assert entry.replica is not None
        del self._placed[entry.replica][entry.number]
        if not entry.kv.moved:
            self._left[entry.replica, entry.number] = entry
        entry.replica, entry.kv.moved = None, True

    def take_left(self, replica: str, message: Done) -> None:
        """Record what a replica says at the end of a sequence that was taken from it, and was not lost."""
        entry = self._left.pop((replica, message.id), None)
        if entry is not None:
            entry.kv.cached = message.usage.cached

    def find(self, replica: str, number: int) -> JournalEntry | None:
        """Return the sequence with a number of a replica; None if it is there no more."""
        placed = self._placed.get(replica)
        return None if placed is None else placed.get(number)

    def take_waiting(self, replica: str, numbers: Iterable[int]) -> None:
        """Record which sequences of a replica no step computes, as it says."""
        waiting = frozenset(numbers)
        for number, entry in self._placed.get(replica, {}).items():
            entry.waits = number in waiting

    def take_tokens(self, entry: JournalEntry, message: TokenOut, base_digest: str) -> TokenOut | None:
        """Record tokens of a replica. Returns those that the client has not yet; None if it has them all."""
        entry.base_digest = base_digest
        if entry.skipped or entry.skipped_scores:
            message = _skip(entry, message)
            if not message.tokens and not message.prompt_logprobs and not message.allowed:
                return None
        entry.generated.extend(message.tokens)
        entry.num_scored += len(message.prompt_logprobs)
        return message.renumbered(entry.submit.id)

    def take_end(self, entry: JournalEntry, message: Done | Failed, now: float) -> Done | Failed:
        """Close a sequence as a replica says. Returns the message for the client.

        Its seconds of decoding are those since the first token of all, if another replica than the last has sent it.
        """
        self.close(entry)
        said = replace(message, id=entry.submit.id)
        if isinstance(said, Done) and entry.kv.cached is not None:
            said = replace(said, usage=replace(said.usage, cached=entry.kv.cached))
        if isinstance(said, Done) and said.stats is not None and entry.losses.in_all and entry.began is not None:
            return replace(said, stats=replace(said.stats, decode=now - entry.began))
        return said

    def close(self, entry: JournalEntry) -> None:
        """End a sequence."""
        if entry.replica is not None:
            del self._placed[entry.replica][entry.number]
        del self._entries[entry.submit.id]
        self.num_bytes -= entry.num_bytes

    def check(self) -> None:
        """Raise AssertionError if entries, places and bytes are inconsistent."""
        placed = [entry for entries in self._placed.values() for entry in entries.values()]
        assert len(placed) == len({entry.submit.id for entry in placed}), "a sequence is on two replicas"
        assert all(self._entries.get(entry.submit.id) is entry for entry in placed), "a closed sequence is on a replica"
        assert self.num_bytes == sum(entry.num_bytes for entry in self._entries.values()) <= self._most_bytes


def _skip(entry: JournalEntry, message: TokenOut) -> TokenOut:
    """Return a replica's message without what the client has already."""
    skipped = min(entry.skipped, len(message.tokens))
    scores = min(entry.skipped_scores, len(message.prompt_logprobs))
    entry.skipped -= skipped
    entry.skipped_scores -= scores
    return replace(
        message,
        tokens=message.tokens[skipped:],
        logprobs=message.logprobs[skipped:],
        prompt_logprobs=message.prompt_logprobs[scores:],
        allowed=message.allowed[skipped:],
    )


def aborted(entry: JournalEntry) -> Done:
    """Return the end of a sequence that its client has aborted while no replica had it."""
    return Done(entry.submit.id, FinishReason.ABORT, entry.usage)


def given_up(entry: JournalEntry, *, in_a_row: bool) -> Failed:
    """Return the end of a sequence that has lost too many replicas, in a row or in all."""
    row = f"{entry.losses.in_a_row} times in a row" if in_a_row else f"{entry.losses.in_all} times"
    error = EngineError(f"The replica of this request failed {row}, so it is not tried again.")
    return failure_of(entry.submit.id, error)


def is_loss(message: Done | Failed) -> bool:
    """Return whether an end says that the replica failed, not the sequence: its other ones have failed too."""
    return isinstance(message, Failed) and message.kind in _LOSSES
