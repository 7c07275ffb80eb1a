"""Response store: keeps past responses in memory (LRU) within limits on their number, size and idle time.

If room is needed, the owner that stores the most loses its least recently used response. So an owner that stores no
more than an equal share never loses a response because of others.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...tenancy.tenant_shares import TenantShares
from ..exact_json import dumps_exact, loads_exact

MAX_RESPONSES = 10_000
MAX_BACKGROUND = 64
_OVERHEAD = 1024  # Approximate size in bytes of the Python objects of a record.
_PER_ITEM = 256  # Size in bytes of the Python objects for an item id.
_MOST_AT_ONCE = 256  # Largest number of records that one put or get examines for eviction.


def packed(value: Any) -> bytes:
    """Serialize JSON for storage.

    The bytes are copied, because orjson's bytes keep their write buffer alive, which is up to 16 times as long.
    """
    return bytes(memoryview(dumps_exact(value)))


@dataclass(slots=True)
class StoredResponse:
    """A response and its conversation.

    Attributes:
        owner: the tenant; "" without keys.
        body: the response, as JSON.
        turns: input items as JSON lists, one for each turn; the lists of earlier turns are shared with the records of
            the earlier responses.
        output: output items, as a JSON list.
        item_ids: ids of the items in the response's own turn.
        job: task of a background response in progress.
        connection: id of the only WebSocket connection that may use the response; empty if its owner may use it on any
            connection.
        last_used: time of the last access, on the store's clock.
    """

    id: str
    owner: str
    body: bytes
    turns: tuple[bytes, ...]
    output: bytes = b"[]"
    item_ids: tuple[str, ...] = ()
    job: asyncio.Task[None] | None = None
    connection: str = ""
    last_used: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Upper bound of the record's memory in bytes. Turns that records share count for each of them."""
        return len(self.body) + sum(map(len, self.conversation())) + _PER_ITEM * len(self.item_ids) + _OVERHEAD

    def items(self) -> list[dict[str, Any]]:
        return [item for turn in self.turns for item in loads_exact(turn)]

    def own_turns(self) -> tuple[bytes, ...]:
        """Return the response's own input turn and its output."""
        return (*self.turns[-1:], self.output)

    def conversation(self) -> tuple[bytes, ...]:
        """Return the turns that precede the next response."""
        return (*self.turns, self.output)


@dataclass(slots=True)
class _Owner:
    """The responses of an owner, the least recently used first, and their size in bytes."""

    records: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0


@dataclass(slots=True)
class ResponseStore:
    """LRU store of responses. Belongs to one event loop.

    Attributes:
        max_bytes: largest size of all records together in bytes; 0 stores nothing.
        max_idle: seconds without access after which a response expires.
        max_count: largest number of responses.
        jobs: shares of the background responses in progress, by tenant.
    """

    max_bytes: int
    max_idle: float
    max_count: int = MAX_RESPONSES
    clock: Callable[[], float] = time.monotonic
    num_bytes: int = 0
    jobs: TenantShares = field(default_factory=lambda: TenantShares(MAX_BACKGROUND))
    _records: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    _owners: dict[str, _Owner] = field(default_factory=dict)
    # (owner, item) -> the responses that have the item, the last stored one last. Clients repeat items with their ids.
    _responses_of_item: dict[tuple[str, str], dict[str, None]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._records

    def stats(self) -> dict[str, float]:
        return {"responses_stored": len(self._records), "responses_stored_bytes": self.num_bytes}

    @property
    def is_on(self) -> bool:
        return self.max_bytes > 0

    def put(self, record: StoredResponse) -> None:
        """Store a response. It replaces one with the same id. The least recently used responses are evicted."""
        self._remove(record.id)
        record.last_used = self.clock()
        self._records[record.id] = record
        for item in record.item_ids:
            self._responses_of_item.setdefault((record.owner, item), {})[record.id] = None
        owner = self._owners.setdefault(record.owner, _Owner())
        owner.records[record.id] = record
        owner.num_bytes += record.num_bytes
        self.num_bytes += record.num_bytes
        if record.job is not None:
            self.jobs.take(record.owner)
        self._evict()

    def get(self, owner: str, response_id: str, connection: str = "") -> StoredResponse | None:
        """Return the response with this id if it belongs to the owner and to no other connection."""
        self._evict()
        record = self._records.get(response_id)
        if record is None or record.owner != owner or record.connection not in ("", connection):
            return None
        self._records.move_to_end(response_id)
        self._owners[owner].records.move_to_end(response_id)
        record.last_used = self.clock()
        return record

    def delete(self, owner: str, response_id: str, connection: str = "") -> bool:
        """Delete a response and cancel its job. Returns False if the owner has no response with this id."""
        record = self.get(owner, response_id, connection)
        if record is None:
            return False
        self._remove(response_id)
        if record.job is not None:
            record.job.cancel()
        return True

    def find_item(self, owner: str, item_id: str, connection: str = "") -> dict[str, Any] | None:
        """Return the item of this id, input or output, from the last of the owner's responses that has it."""
        holders = reversed(tuple(self._responses_of_item.get((owner, item_id), ())))
        # The last one may belong to another connection.
        record = next((found for each in holders if (found := self.get(owner, each, connection)) is not None), None)
        if record is None:
            return None
        items = (item for turn in record.own_turns() for item in loads_exact(turn))
        return next((item for item in items if item["id"] == item_id), None)

    def _evict(self) -> None:
        """Evict expired responses, then responses of the owners that have the most; responses in progress are kept."""
        expired = self.clock() - self.max_idle
        for record in tuple(itertools.islice(self._records.values(), _MOST_AT_ONCE)):
            if record.last_used > expired:
                break
            if record.job is None:
                self._remove(record.id)
        for _ in range(_MOST_AT_ONCE):
            if self.num_bytes > self.max_bytes:
                order = sorted(self._owners.values(), key=lambda owner: -owner.num_bytes)
            elif len(self._records) > self.max_count:
                order = sorted(self._owners.values(), key=lambda owner: -len(owner.records))
            else:
                return
            ended = (each.id for owner in order for each in owner.records.values() if each.job is None)
            if (oldest := next(ended, None)) is None:
                return
            self._remove(oldest)

    def _remove(self, response_id: str) -> None:
        record = self._records.pop(response_id, None)
        if record is None:
            return
        owner = self._owners[record.owner]
        del owner.records[response_id]
        owner.num_bytes -= record.num_bytes
        if not owner.records:
            del self._owners[record.owner]
        if record.job is not None:
            self.jobs.give_back(record.owner)
        self.num_bytes -= record.num_bytes
        for item in set(record.item_ids):
            holders = self._responses_of_item[record.owner, item]
            del holders[response_id]
            if not holders:
                del self._responses_of_item[record.owner, item]
