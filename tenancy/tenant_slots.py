"""Tenant slots: slots that tenants share. A tenant may hold at most as many slots as it leaves free.

    tenant a: 9 waiting --+
    tenant b: 1 waiting --+--> the tenant that holds the fewest, of several the one served longest ago --> slots

So even if a tenant requests all slots and never releases one, half of the slots are left for others.
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
    """A tenant already has as many waiting turns as it may have."""


@dataclass(slots=True, eq=False)
class Turn:
    """A tenant's turn: it waits for a slot and then holds it, until ``TenantSlots.leave``.

    Attributes:
        granted: done when the turn holds a slot.
    """

    tenant: str
    granted: Future[None] = field(default_factory=Future)
    holds: bool = False


class TenantSlots:
    """A number of slots. Thread-safe.

    Without keys there is one tenant, "", which may hold all slots.

    Args:
        count: number of slots.
        most_waiting: number of turns that may wait. Tenants share it by the same rule as the slots. 0 for no limit.
    """

    def __init__(self, count: int, most_waiting: int = 0) -> None:
        self._lock = Lock()
        self._held = TenantShares(count)
        self._queued = TenantShares(most_waiting) if most_waiting else None
        self._waiting: dict[str, deque[Turn]] = {}
        # By waiting tenant: the number of the last slot that it was given, counted over all tenants.
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
        """Return a turn that waits for a slot; the slot may be granted at once. The caller must ``leave`` the turn.

        Raises:
            ShareFull: the tenant already has as many waiting turns as it may have.
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
        """Give back the slot of a turn, or end its wait."""
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
        """Wait for a slot on this thread, and hold it inside the block."""
        turn = self.ask(tenant)
        try:
            turn.granted.result()
            yield
        finally:
            self.leave(turn)

    @asynccontextmanager
    async def hold_async(self, tenant: str) -> AsyncIterator[None]:
        """Asynchronous form of ``hold``, for an event loop."""
        turn = self.ask(tenant)
        try:
            await wrap_future(turn.granted)
            yield
        finally:
            self.leave(turn)

    def _grant(self) -> list[Turn]:
        """Give free slots to waiting turns, and return these turns. The caller holds the lock."""
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
        """Remove a turn from the queue."""
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
