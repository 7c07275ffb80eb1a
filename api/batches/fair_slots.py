"""Fair slots: limits on the requests of batches in flight, with slots shared evenly by the tenants that have requests.

``OwnerTurns`` limits the batches of each tenant. Both classes keep no data about idle tenants.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class OwnerTurns:
    """Limits the number of concurrent turns of each owner. Belongs to one event loop.

    Args:
        count: number of turns of each owner.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        # The semaphore of each owner that has a turn or waits for one.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def __len__(self) -> int:
        """Return the number of owners that have a turn, or wait for one."""
        return len(self._turns)

    @asynccontextmanager
    async def hold(self, owner: str) -> AsyncGenerator[None, None]:
        """Context manager: wait for a turn, and hold it during the block."""
        turns = self._turns.get(owner)
        if turns is None:
            turns = self._turns[owner] = asyncio.Semaphore(self._count)
        async with turns:
            yield


class FairSlots:
    """Limits the number of slots in use, and shares them fairly among owners. Belongs to one event loop.

    A free slot goes to the waiting owner that holds the fewest slots. Of several such owners, it goes to the one whose
    last slot was given longest ago. So a new owner gets its share as soon as others release slots, and a single owner
    may hold all slots.

    Args:
        count: number of slots.
        least: number of slots that each owner gets at once, even if others hold all ``count`` slots.
    """

    def __init__(self, count: int, least: int = 0) -> None:
        # Number of free slots. It is negative while owners hold slots within ``least`` although all slots are in use.
        self._free = count
        self._least = least
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        # For each owner, the number of the slot that it was given last. Owners without an entry count as 0.
        self._last: dict[str, int] = {}
        self._num_given = 0

    def __len__(self) -> int:
        """Return the number of owners that hold a slot, wait for one, or have an entry for their turn."""
        return len(self._held.keys() | self._waiting.keys() | self._last.keys())

    @asynccontextmanager
    async def hold(self, owner: str) -> AsyncGenerator[None, None]:
        """Context manager: wait for a slot, and hold it during the block."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._grant()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._give_back(owner)
            else:
                self._leave(owner, turn)

    def _grant(self) -> None:
        while self._waiting:
            owner = min(self._waiting, key=lambda each: (self._held[each], self._last.get(each, 0)))
            if self._free <= 0 and self._held[owner] >= self._least:
                return
            turns = self._waiting[owner]
            turn = turns.popleft()
            if not turns:
                del self._waiting[owner]
            if turn.cancelled():
                # Its task was cancelled, and has not run since to leave the queue.
                continue
            turn.set_result(None)
            self._num_given += 1
            self._last[owner] = self._num_given
            self._held[owner] += 1
            self._free -= 1

    def _give_back(self, owner: str) -> None:
        self._held[owner] -= 1
        self._free += 1
        if not self._held[owner]:
            del self._held[owner]
            self._forget_old()
        self._grant()

    def _forget_old(self) -> None:
        """Remove the entries of owners without a slot that were served before all waiting owners.

        They then count as new.
        """
        oldest = min((self._last.get(owner, 0) for owner in self._waiting), default=self._num_given + 1)
        kept = {owner: last for owner, last in self._last.items() if last >= oldest or owner in self._held}
        self._last = kept

    def _leave(self, owner: str, turn: asyncio.Future[None]) -> None:
        """Forget a turn that no longer waits. It may have left the queue already, when a slot came free."""
        turns = self._waiting.get(owner, ())
        if turn in turns:
            self._waiting[owner].remove(turn)
            if not self._waiting[owner]:
                del self._waiting[owner]
