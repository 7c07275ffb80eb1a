"""KV handover: copies prefixes to replicas that have not requested them. Does no I/O and reads no clock.

    gateway --ListPrefixes--> source --CachedPrefixes--> gateway --ReadKv--> source
            <------------------------KvBlocks-----------------------------------
            --KvBlocks--> target

A draining replica copies the prefixes of its sessions to the remaining replicas; a joining replica gets the hottest
prefixes of one of them. Copied KV is kept in the target's tier ``peer``, which has a size limit, until sequences use
it. KV that is not copied is computed again.
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
    """A planned copy of a prefix from one replica to another, with the hashes of the prefix's blocks."""

    source: str
    target: str
    prefix: KvPrefix
    chain: Sequence[int]


class KvHandover:
    """Requests for prefixes, planned copies, and running copies."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[str, str]] = {}
        self._planned: deque[PlannedCopy] = deque()
        self._running: dict[int, PlannedCopy] = {}  # by ticket
        self._drained: set[str] = set()

    def ask(self, source: str, target: str = "") -> ListPrefixes:
        """Return the request for the prefixes of sessions, or with a target for the hottest prefixes for it."""
        number = next(self._numbers)
        self._asked[number] = source, target
        return ListPrefixes(number, of_sessions=not target)

    def begin_drain(self, source: str) -> bool:
        """Record that a drained replica is asked for its sessions. Returns False if it was asked before."""
        is_new = source not in self._drained
        self._drained.add(source)
        return is_new

    def reopen(self, name: str) -> None:
        """Record that a replica no longer drains."""
        self._drained.discard(name)

    def answered(self, number: int) -> tuple[str, str] | None:
        """Return source and target of an answered request; the target is "" for sessions. None if it is unknown."""
        return self._asked.pop(number, None)

    def plan(self, copy: PlannedCopy) -> None:
        """Add a copy, which begins after the copies before it."""
        self._planned.append(copy)

    def take(self) -> PlannedCopy | None:
        """Return the next copy that may begin: only one at a time per source, which sends a part after each step."""
        busy = {each.source for each in self._running.values()}
        for copy in self._planned:
            if copy.source not in busy:
                self._planned.remove(copy)
                return copy
        return None

    def begin(self, ticket: int, copy: PlannedCopy) -> None:
        """Record the number of a copy's read."""
        self._running[ticket] = copy

    def end(self, ticket: int) -> PlannedCopy | None:
        """Return the copy that ends with the last answer to a read; None for other reads."""
        return self._running.pop(ticket, None)

    def uses(self, source: str) -> bool:
        """Return whether prefixes are still expected from a replica, or being copied from it."""
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
