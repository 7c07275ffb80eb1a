"""Journal of sequences: each ``Submit`` and the tokens sent to the client, so that another replica can continue it.

    open --place--> on a replica --take--> tokens, Done or Failed (closed)
      ^                  |
      '------ lift ------'    the replica is lost

On each replica a sequence has another number. After a sequence has left a replica (lift), the journal no longer knows
its number there, so later messages of that replica about it are dropped. So no token is delivered twice, and every
sequence ends once.
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

# Approximate size of an entry without its tokens.
_ENTRY_BYTES = 2048
_TOKEN_BYTES = 4
_LOSSES = ("EngineDead", "EngineError")


@dataclass(slots=True)
class Losses:
    """Counts of the lost replicas where a sequence was. Written by ``Dispatcher``.

    Attributes:
        in_a_row: number of replicas lost in a row while the sequence was there and got no token.
        in_all: number of replicas lost while the sequence was there.
        last: time of the last loss, if the sequence has got no token since.
        is_careful: whether the sequence lost two replicas within ``quiet_seconds``, so that it waits until no replica
            was lost for that long.
    """

    in_a_row: int = 0
    in_all: int = 0
    last: float = -math.inf
    is_careful: bool = False


@dataclass(slots=True)
class KvPlan:
    """Replicas that hold KV of a sequence, or will get it. Written by ``Dispatcher``.

    Attributes:
        source: another replica that holds KV of the sequence; "" for none.
        decoder: replica that will continue the sequence once its prompt is computed, and gets its KV meanwhile; "" for
            none.
        push: number of the transfer that copies the KV to ``decoder``.
        cached: number of the prompt's tokens that were cached where the prompt was computed; None to use the last
            replica's report.
        moved: whether the sequence was moved from the replica that computed its prompt.
    """

    source: str = ""
    decoder: str = ""
    push: int = 0
    cached: int | None = None
    moved: bool = False


@dataclass(slots=True, eq=False)
class JournalEntry:
    """An open sequence.

    Written by ``Journal``; ``Dispatcher`` writes the request's priority, ``grammar``, and all fields from ``aborted``
    on.

    Attributes:
        submit: the request, with the client's number, the seed and the version of the adapter.
        generated: tokens that were delivered to the client, behind those that its request has brought
            (``Submit.generated``).
        num_scored: number of the prompt's logprobs that were delivered to the client.
        replica: replica that has the sequence; None while it waits for one.
        number: number of the sequence on that replica.
        grammar: key of the sequence's grammar; 0 for none.
        base_digest: digest of the model that generated the tokens; "" while there are no tokens.
        skipped: number of the next tokens that are dropped, because the client has them already.
        skipped_scores: number of the prompt's next logprobs that are dropped likewise.
        aborted: whether the client has aborted the sequence.
        losses: counts of the lost replicas where it was.
        began: time of its first token; None before that.
        waits: whether its replica has reported that no step computes it, because it waits in the queue or for its
            grammar.
        is_late: whether its replica was already silent when the sequence was sent there, so that the sequence cannot be
            the cause if the replica is lost.
        kv: replicas that hold its KV.
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
        """Largest number of bytes that the entry takes until its end."""
        tokens = len(self.submit.tokens) + self.submit.params.max_tokens
        return _ENTRY_BYTES + _TOKEN_BYTES * tokens

    @property
    def answer(self) -> array[int]:
        """All tokens of the answer so far: those that the request has brought, then those delivered to the client."""
        return self.submit.generated + self.generated

    @property
    def num_answered(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self.submit.generated) + len(self.generated)

    @property
    def usage(self) -> Usage:
        """Token counts for a sequence that no replica ends."""
        return Usage(len(self.submit.tokens), 0, self.num_answered)


class Journal:
    """All open sequences, within a limit on their memory.

    Args:
        most_bytes: limit for all entries together, each counted with the largest number of tokens that it may get.
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
        """Return the open sequence with a client's number."""
        return self._entries.get(number)

    def on(self, replica: str) -> list[JournalEntry]:
        """Return the sequences on a replica."""
        return list(self._placed.get(replica, {}).values())

    def uses_adapter(self, version: str) -> bool:
        """Return whether an open sequence uses an adapter, alone or in a combination. Takes linear time."""
        asked = (entry.submit.adapter for entry in self._entries.values())
        return any(adapter is not None and version in names_in(adapter) for adapter in asked)

    def open(self, submit: Submit) -> JournalEntry:
        """Add a sequence. Raises CapacityError if the journal is full, ValueError if the number is open already."""
        if submit.id in self._entries:
            raise ValueError(f"sequence {submit.id} is open already")
        entry = JournalEntry(submit)
        if self.num_bytes + entry.num_bytes > self._most_bytes:
            raise CapacityError(f"The server's journal is full: it holds {len(self)} requests.")
        self.num_bytes += entry.num_bytes
        self._entries[submit.id] = entry
        return entry

    def place(self, entry: JournalEntry, replica: str, base_digest: str) -> Submit:
        """Assign a sequence to a replica. Returns the message for it, which continues after the client's tokens.

        Raises ValueError if the sequence has tokens of another base model.
        """
        if entry.base_digest not in ("", base_digest):
            raise ValueError(f"tokens of base model {entry.base_digest} cannot be continued with {base_digest}")
        entry.replica, entry.number, entry.waits = replica, next(self._numbers), False
        self._placed.setdefault(replica, {})[entry.number] = entry
        # A replica draws at least one token: if the client has all tokens but no end, the last token is drawn again.
        sent = entry.answer[: entry.submit.params.max_tokens - 1]
        entry.skipped = entry.num_answered - len(sent)
        entry.skipped_scores = 0 if sent else entry.num_scored
        return replace(entry.submit, id=entry.number, generated=sent)

    def lift(self, replica: str) -> list[JournalEntry]:
        """Remove all sequences from a replica, and return them in the order in which they were sent there."""
        entries = list(self._placed.pop(replica, {}).values())
        for entry in entries:
            entry.replica = None
        for place in [place for place in self._left if place[0] == replica]:
            del self._left[place]
        return entries

    def move(self, entry: JournalEntry) -> None:
        """Remove one sequence from its replica."""
        assert entry.replica is not None
        del self._placed[entry.replica][entry.number]
        if not entry.kv.moved:
            self._left[entry.replica, entry.number] = entry
        entry.replica, entry.kv.moved = None, True

    def take_left(self, replica: str, message: Done) -> None:
        """Record a replica's message about the end of a sequence that was moved away from it without a loss."""
        entry = self._left.pop((replica, message.id), None)
        if entry is not None:
            entry.kv.cached = message.usage.cached

    def find(self, replica: str, number: int) -> JournalEntry | None:
        """Return the sequence with a number on a replica; None if it is no longer there."""
        placed = self._placed.get(replica)
        return None if placed is None else placed.get(number)

    def take_waiting(self, replica: str, numbers: Iterable[int]) -> None:
        """Record which sequences of a replica wait without being computed, as the replica reports."""
        waiting = frozenset(numbers)
        for number, entry in self._placed.get(replica, {}).items():
            entry.waits = number in waiting

    def take_tokens(self, entry: JournalEntry, message: TokenOut, base_digest: str) -> TokenOut | None:
        """Record tokens from a replica. Returns the tokens that the client lacks; None if it has them all."""
        entry.base_digest = base_digest
        if entry.skipped or entry.skipped_scores:
            message = _skip(entry, message)
            if not message.tokens and not message.prompt_logprobs and not message.allowed:
                return None
        entry.generated.extend(message.tokens)
        entry.num_scored += len(message.prompt_logprobs)
        return message.renumbered(entry.submit.id)

    def take_end(self, entry: JournalEntry, message: Done | Failed, now: float) -> Done | Failed:
        """Close a sequence at a replica's message. Returns the message for the client.

        The seconds of decoding count from the sequence's first token, even if an earlier replica has sent that token.
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
        """Raise AssertionError if entries, their replicas and their bytes are inconsistent."""
        placed = [entry for entries in self._placed.values() for entry in entries.values()]
        assert len(placed) == len({entry.submit.id for entry in placed}), "a sequence is on two replicas"
        assert all(self._entries.get(entry.submit.id) is entry for entry in placed), "a closed sequence is on a replica"
        assert self.num_bytes == sum(entry.num_bytes for entry in self._entries.values()) <= self._most_bytes


def _skip(entry: JournalEntry, message: TokenOut) -> TokenOut:
    """Return a replica's message without the tokens and logprobs that the client has already."""
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
    """Return the end message of a sequence that its client aborted while no replica had it."""
    return Done(entry.submit.id, FinishReason.ABORT, entry.usage)


def given_up(entry: JournalEntry, *, in_a_row: bool) -> Failed:
    """Return the end message of a sequence that has lost too many replicas, in a row or in all."""
    row = f"{entry.losses.in_a_row} times in a row" if in_a_row else f"{entry.losses.in_all} times"
    error = EngineError(f"The replica of this request failed {row}, so it is not tried again.")
    return failure_of(entry.submit.id, error)


def is_loss(message: Done | Failed) -> bool:
    """Return whether an end message reports a failure of the replica, so that its other sequences have failed too."""
    return isinstance(message, Failed) and message.kind in _LOSSES
