"""KV handover: prefixes that are copied to replicas which have not asked for them. No I/O, no clock.

    gateway --ListPrefixes--> source --CachedPrefixes--> gateway --ReadKv--> source
            <------------------------KvBlocks-----------------------------------
            --KvBlocks--> target

A replica that drains hands what its sessions hold to those that stay; one that joins others gets the hottest prefixes
of one of them. What arrives waits in the target's tier ``peer``, which bounds it. What does not is computed again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.messages import ListPrefixes
from ..engine.types import KvPrefix


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """A prefix that one replica is to get from another, and the hashes of its blocks."""

    source: str
    target: str
    prefix: KvPrefix
    chain: Sequence[int]


class KvHandover:
    """Questions for prefixes, copies that are planned, and those that are under way."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[str, str]] = {}
        self._planned: deque[PlannedCopy] = deque()
        self._running: dict[int, PlannedCopy] = {}  # by ticket
        self._drained: set[str] = set()

    def ask(self, source: str, target: str = "") -> ListPrefixes:
        """Return the question for what sessions hold, or with a target for the hottest prefixes, which are for it."""
        number = next(self._numbers)
        self._asked[number] = source, target
        return ListPrefixes(number, of_sessions=not target)

    def begin_drain(self, source: str) -> bool:
        """Note that a drained replica is asked for its sessions. False where it was before."""
        is_new = source not in self._drained
        self._drained.add(source)
        return is_new

    def reopen(self, name: str) -> None:
        """Note that a replica drains no more."""
        self._drained.discard(name)

    def answered(self, number: int) -> tuple[str, str] | None:
        """Return source and target of a question that is answered now; no target for sessions, None if unknown."""
        return self._asked.pop(number, None)

    def plan(self, copy: PlannedCopy) -> None:
        """Add a copy, which begins after those before it."""
        self._planned.append(copy)

    def take(self) -> PlannedCopy | None:
        """Return the next copy that may begin: one at a time of a source, as it sends a part after each step."""
        busy = {each.source for each in self._running.values()}
        for copy in self._planned:
            if copy.source not in busy:
                self._planned.remove(copy)
                return copy
        return None

    def begin(self, ticket: int, copy: PlannedCopy) -> None:
        """Note the number of a copy's read."""
        self._running[ticket] = copy

    def end(self, ticket: int) -> PlannedCopy | None:
        """Return the copy that has ended with the last answer to a read; None for other reads."""
        return self._running.pop(ticket, None)

    def uses(self, source: str) -> bool:
        """Return whether a replica is still to name prefixes, or to send them."""
        copies = (*self._planned, *self._running.values())
        return any(source == asked for asked, _ in self._asked.values()) or any(
            each.source == source for each in copies
        )

    def leave(self, name: str) -> None:
        """Forget a replica."""
        self._drained.discard(name)
        self._asked = {number: each for number, each in self._asked.items() if name not in each}
        self._planned = deque(each for each in self._planned if name not in (each.source, each.target))
        self._running = {
            ticket: each for ticket, each in self._running.items() if name not in (each.source, each.target)
        }
