"""Event store: keeps numbered events of responses, so that streams can be resumed, within limits of size and time.

If room is needed, events of the owner with the most bytes are removed: its oldest log that has ended, or if none has
ended, the older half of its largest log. So an owner that keeps no more than an equal share never loses events because
of others.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from ...engine.errors import RequestError
from ..errors import HTTPError

_OVERHEAD = 128  # Approximate size in bytes of the Python objects of an event.
_PIECE_BYTES = 64 << 10  # Number of bytes that are read at once.


def not_kept(which: str) -> HTTPError:
    """Return the error for events that are no longer stored, or never were."""
    text = f"The {which} of this response are not stored: get the response without 'stream'."
    return HTTPError(410, text, code="events_not_kept")


class EventLog:
    """The serialized events of one response, by number. Belongs to one event loop.

    Attributes:
        owner: the tenant; "" without keys.
        first: number of the oldest event that is kept.
        num_bytes: bytes of the events that are kept.
        ended_at: time of the last event, on the store's clock; None while more events may follow.
    """

    def __init__(self, store: EventStore, response_id: str, owner: str) -> None:
        self.response_id = response_id
        self.owner = owner
        self.first = 0
        self.num_bytes = 0
        self.ended_at: float | None = None
        self._store = store
        self._events: list[bytes] = []
        self._is_forgotten = False
        self._changed: asyncio.Event | None = None  # Set while a reader waits for the next event.

    @property
    def next_number(self) -> int:
        return self.first + len(self._events)

    def append(self, event: bytes) -> None:
        """Add the event with the next number."""
        if not self._is_forgotten:
            self._events.append(event)
            self._grow(len(event) + _OVERHEAD)
            self._tell()

    def end(self) -> None:
        """Tell readers that no more events follow."""
        if self.ended_at is None:
            self.ended_at = self._store.clock()
            if not self._is_forgotten:
                self._store.take_end(self)
            self._tell()

    def shrink(self) -> None:
        """Drop the older half of the events."""
        self._drop((len(self._events) + 1) // 2)

    def forget(self) -> None:
        """Drop all events, and ignore later ones."""
        self._drop(len(self._events))
        self._is_forgotten = True

    def _drop(self, num_events: int) -> None:
        dropped = sum(len(event) + _OVERHEAD for event in self._events[:num_events])
        del self._events[:num_events]
        self.first += num_events
        self._grow(-dropped)
        self._tell()

    def check(self, after: int) -> None:
        """Check that all events after a number can be read.

        Raises:
            HTTPError: 410: some of these events are no longer kept.
            RequestError: no event has this number yet.
        """
        if self._is_forgotten or after + 1 < self.first:
            which = "events" if self._is_forgotten else f"events up to number {self.first - 1}"
            raise not_kept(which)
        if after >= self.next_number:
            text = f"'starting_after' must be at most the last event, {self.next_number - 1}, not {after}."
            raise RequestError(text, param="starting_after")

    async def read(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events after this number, several at once, until the last one. Raises HTTPError like ``check``."""
        number = after + 1
        while True:
            if self._is_forgotten or number < self.first:
                self.check(number - 1)
            if number >= self.next_number:
                if self.ended_at is not None:
                    return
                self._changed = self._changed or asyncio.Event()
                await self._changed.wait()
                continue
            piece, size = [], 0
            while number < self.next_number and size < _PIECE_BYTES:
                piece.append(self._events[number - self.first])
                size += len(piece[-1])
                number += 1
            yield b"".join(piece)

    def _grow(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._store.grow(self, num_bytes)

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


@dataclass(slots=True)
class _OwnerLogs:
    """The logs of an owner and their size in bytes. Ended logs are in the order of their ends."""

    running: dict[str, EventLog] = field(default_factory=dict)
    ended: OrderedDict[str, EventLog] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class EventStore:
    """Logs of events by response. Belongs to one event loop.

    Args:
        max_bytes: largest size of all logs together in bytes; 0 stores nothing.
        ttl: seconds after a response's end for which its events are kept.
    """

    def __init__(self, max_bytes: int, ttl: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.clock = clock
        self.num_bytes = 0
        self._ttl = ttl
        self._owners: dict[str, _OwnerLogs] = {}
        self._logs: dict[str, EventLog] = {}
        self._ended: OrderedDict[str, EventLog] = OrderedDict()

    def __len__(self) -> int:
        return len(self._logs)

    def stats(self) -> dict[str, float]:
        return {"response_event_bytes": self.num_bytes}

    def open(self, response_id: str, owner: str) -> EventLog:
        """Create the log of a response."""
        self._expire()
        log = self._logs[response_id] = EventLog(self, response_id, owner)
        self._owners.setdefault(owner, _OwnerLogs()).running[response_id] = log
        return log

    def get(self, owner: str, response_id: str) -> EventLog | None:
        """Return the log of a response if it belongs to the owner."""
        self._expire()
        log = self._logs.get(response_id)
        return None if log is None or log.owner != owner else log

    def drop(self, response_id: str) -> None:
        """Remove the log of a response, if there is one. Its readers get an error."""
        log = self._logs.get(response_id)
        if log is not None:
            log.forget()
            del self._logs[response_id]
            owner = self._owners[log.owner]
            owner.running.pop(response_id, None)
            owner.ended.pop(response_id, None)
            self._ended.pop(response_id, None)
            if not owner.running and not owner.ended:
                del self._owners[log.owner]

    def take_end(self, log: EventLog) -> None:
        """Record that a log has ended. Called by the log."""
        owner = self._owners[log.owner]
        del owner.running[log.response_id]
        owner.ended[log.response_id] = self._ended[log.response_id] = log

    def grow(self, log: EventLog, num_bytes: int) -> None:
        """Count bytes that a log has gained or lost. For gained bytes, space is freed. Called by the log."""
        self.num_bytes += num_bytes
        self._owners[log.owner].num_bytes += num_bytes
        while num_bytes > 0 and self.num_bytes > self.max_bytes:
            owner = max(self._owners.values(), key=lambda each: each.num_bytes)
            if owner.ended:
                self.drop(next(iter(owner.ended)))
            else:
                max(owner.running.values(), key=lambda each: each.num_bytes).shrink()

    def _expire(self) -> None:
        limit = self.clock() - self._ttl
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if oldest.ended_at is None or oldest.ended_at > limit:
                return
            self.drop(oldest.response_id)
