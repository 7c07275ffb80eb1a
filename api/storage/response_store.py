"""Past responses, kept in memory within bounds of count, bytes and time. Each belongs to who asked for it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

MAX_RESPONSES = 10_000
_OVERHEAD = 1024  # bytes of Python's own for a record, about
_PER_ITEM = 256  # the same for an item's id
_MOST_AT_ONCE = 256  # records looked at when one is put or asked for: more go with the next


def packed(value: Any) -> bytes:
    """JSON to be kept: orjson's own bytes hold the room that it wrote in, up to 16 times what they are long."""
    return bytes(memoryview(orjson.dumps(value)))


@dataclass(slots=True)
class StoredResponse:
    """A response, and the conversation that led to it.

    Attributes:
        id: its id.
        owner: the tenant who asked for it, empty where there are no keys.
        body: the response, as JSON.
        turns: the items that it answers, as JSON lists; those of earlier responses are shared with their records.
        output: the items that it made, as a JSON list.
        item_ids: of the items that it brought in or made.
        job: what makes it, while it is made in the background.
        last_used: when somebody last asked for it, on the store's clock.
    """

    id: str
    owner: str
    body: bytes
    turns: tuple[bytes, ...]
    output: bytes = b"[]"
    item_ids: tuple[str, ...] = ()
    job: asyncio.Task[None] | None = None
    last_used: float = 0.0

    @property
    def num_bytes(self) -> int:
        """What it takes, at most: shared turns are counted for each record."""
        return len(self.body) + sum(map(len, self.conversation())) + _PER_ITEM * len(self.item_ids) + _OVERHEAD

    def items(self) -> list[dict[str, Any]]:
        """The items that it answers."""
        return [item for turn in self.turns for item in orjson.loads(turn)]

    def own_turns(self) -> tuple[bytes, ...]:
        """The turns that are no earlier response's."""
        return (*self.turns[-1:], self.output)

    def conversation(self) -> tuple[bytes, ...]:
        """The turns that an answer to it goes on from."""
        return (*self.turns, self.output)


@dataclass(slots=True)
class ResponseStore:
    """Keeps the responses used last. One event loop uses it.

    Attributes:
        max_bytes: of all records together; 0 keeps nothing.
        max_idle: seconds after which a response that nobody asks for is forgotten.
        max_count: most responses.
    """

    max_bytes: int
    max_idle: float
    max_count: int = MAX_RESPONSES
    clock: Callable[[], float] = time.monotonic
    num_bytes: int = 0
    _records: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    _holders: dict[tuple[str, str], str] = field(default_factory=dict)  # (owner, item) -> response

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._records

    def stats(self) -> dict[str, float]:
        """Gauges for the metrics."""
        return {"responses_stored": len(self._records), "responses_stored_bytes": self.num_bytes}

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self.max_bytes > 0

    @property
    def num_jobs(self) -> int:
        """Responses that are being made in the background."""
        return sum(record.job is not None for record in self._records.values())

    def put(self, record: StoredResponse) -> None:
        """Keep a response, in place of one of the same id; the ones used least recently make room for it."""
        self._remove(record.id)
        record.last_used = self.clock()
        self._records[record.id] = record
        self._holders.update({(record.owner, item): record.id for item in record.item_ids})
        self.num_bytes += record.num_bytes
        self._make_room()

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The response of this id, if it is the owner's."""
        self._make_room()
        record = self._records.get(response_id)
        if record is None or record.owner != owner:
            return None
        self._records.move_to_end(response_id)
        record.last_used = self.clock()
        return record

    def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response, and stop making it. Returns whether there was one of the owner's."""
        record = self.get(owner, response_id)
        if record is None:
            return False
        self._remove(response_id)
        if record.job is not None:
            record.job.cancel()
        return True

    def find_item(self, owner: str, item_id: str) -> dict[str, Any] | None:
        """The item of this id in one of the owner's responses, whether it went in or came out."""
        record = self.get(owner, self._holders.get((owner, item_id), ""))
        if record is None:
            return None
        items = (item for turn in record.own_turns() for item in orjson.loads(turn))
        return next((item for item in items if item["id"] == item_id), None)

    def _make_room(self) -> None:
        """Forget what is idle for too long, then the least recently used; what is still being made stays."""
        oldest = self.clock() - self.max_idle
        for record in tuple(itertools.islice(self._records.values(), _MOST_AT_ONCE)):
            full = self.num_bytes > self.max_bytes or len(self._records) > self.max_count
            if not full and record.last_used > oldest:
                return
            if record.job is None:
                self._remove(record.id)

    def _remove(self, response_id: str) -> None:
        record = self._records.pop(response_id, None)
        if record is None:
            return
        self.num_bytes -= record.num_bytes
        for item in record.item_ids:
            if self._holders.get((record.owner, item)) == response_id:
                del self._holders[record.owner, item]
