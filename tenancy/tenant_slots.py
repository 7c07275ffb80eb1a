"""Tenant slots: slots that all use, of which each tenant holds as many as it leaves, given out by fair queueing.

    tenant a: 9 waiting --+
    tenant b: 1 waiting --+--> the tenant that holds the fewest, of several the one served longest ago --> slots

So a tenant that asks for all of them, and never gives one back, still leaves half of them to others.
"""

from __future__ import annotations

from asyncio import wrap_future
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from threading import Lock

from .tenant_shares import TenantShares


class ShareFull(Exception):
    """A tenant has as much waiting as it may."""


@dataclass(slots=True, eq=False)
class Turn:
    """A turn of a tenant: waits for a slot, then holds it, until ``TenantSlots.leave``.

    Attributes:
        granted: done once it holds one.
    """

    tenant: str
    granted: Future[None] = field(default_factory=Future)
    holds: bool = False


class TenantSlots:
    """A number of slots. Thread-safe.

    Without keys there is one tenant, "", which may hold all.

    Args:
        count: the slots.
        most_waiting: turns that may wait, parted among tenants in the same way; 0 for no limit.
    """

    def __init__(self, count: int, most_waiting: int = 0) -> None:
        self._lock = Lock()
        self._held = TenantShares(count)
        self._queued = TenantShares(most_waiting) if most_waiting else None
        self._waiting: dict[str, deque[Turn]] = {}
        # The number of the last slot that each waiting tenant was given, among all slots given.
        self._served: Counter[str] = Counter()
        self._num_given = 0

    @property
    def num_held(self) -> int:
        return self._held.total

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def ask(self, tenant: str) -> Turn:
        """Begin to wait for a slot, which may be granted at once. The turn must be left.

        Raises:
            ShareFull: the tenant has as many turns waiting as it may.
        """
        turn = Turn(tenant)
        with self._lock:
            if self._queued is not None:
                if self._queued.left_for(tenant) < 1:
                    raise ShareFull
                self._queued.take(tenant)
            self._waiting.setdefault(tenant, deque()).append(turn)
            granted = self._grant()
        _tell(granted)
        return turn

    def leave(self, turn: Turn) -> None:
        """Give back the slot of a turn, or let it wait no longer."""
        with self._lock:
            if turn.holds:
                turn.holds = False
                self._held.give_back(turn.tenant)
            elif turn in self._waiting.get(turn.tenant, ()):
                self._forget(turn)
            granted = self._grant()
        _tell(granted)

    @contextmanager
    def hold(self, tenant: str) -> Iterator[None]:
        """Wait for a slot, on this thread, and hold it inside the block."""
        turn = self.ask(tenant)
        try:
            turn.granted.result()
            yield
        finally:
            self.leave(turn)

    @asynccontextmanager
    async def hold_async(self, tenant: str) -> AsyncIterator[None]:
        """As ``hold``, on an event loop."""
        turn = self.ask(tenant)
        try:
            await wrap_future(turn.granted)
            yield
        finally:
            self.leave(turn)

    def _grant(self) -> list[Turn]:
        """Give out what can be given, with the lock held. Returns the turns, which are to be told without it."""
        granted = []
        while may := [tenant for tenant in self._waiting if self._held.left_for(tenant) >= 1]:
            tenant = min(may, key=lambda each: (self._held.held(each), self._served[each]))
            turn = self._waiting[tenant][0]
            self._forget(turn)
            self._num_given += 1
            self._served[tenant] = self._num_given
            self._held.take(tenant)
            turn.holds = True
            granted.append(turn)
        return granted

    def _forget(self, turn: Turn) -> None:
        """Take a turn out of the queue."""
        turns = self._waiting[turn.tenant]
        turns.remove(turn)
        if not turns:
            del self._waiting[turn.tenant]
        if self._queued is not None:
            self._queued.give_back(turn.tenant)
        if not self._waiting:
            # The numbers order tenants that wait, and nobody waits.
            self._served.clear()


def _tell(granted: list[Turn]) -> None:
    for turn in granted:
        if turn.granted.set_running_or_notify_cancel():
            turn.granted.set_result(None)
