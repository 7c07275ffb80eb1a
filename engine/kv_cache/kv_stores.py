"""KV stores: blocks outside the pool, in host memory or in files. Bounded and thread-safe; a fault is a miss."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from hashlib import blake2b
from threading import Lock
from typing import Protocol

from .block_codec import BlockCodec, Buffer, NotABlock
from .block_files import BlockFiles
from .block_keys import BlockId
from .kv_events import TierEventLog
from .tier_index import TierIndex

logger = logging.getLogger("rootgraft.kv")

_LOG_SECONDS = 60.0  # from one logged fault of a store to the next


@dataclass(slots=True)
class StoreStats:
    """Counters of a store since the start.

    Attributes:
        hits: pages that were read.
        misses: pages that were no longer there, or not readable.
        stored: pages that were written.
        evicted: pages that made room for others.
        rejected: pages whose content does not belong to their name: damaged or foreign ones.
        errors: reads and writes that the operating system refused.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    rejected: int = 0
    errors: int = 0

    def counters(self, tier: str) -> dict[str, float]:
        """Return the counters by their names in metrics."""
        return {f"kv_{each.name}_{tier}": getattr(self, each.name) for each in fields(self)}


class KvStore(Protocol):
    """A tier of KV outside the pool.

    Attributes:
        tier: its name.
        capacity: limit in bytes.
    """

    tier: str
    capacity: int

    def touch(self, key: bytes) -> bool:
        """Note a use of a page. False if it is not here."""

    def put(self, block: BlockId, payload: Buffer) -> None:
        """Store a page, which may fail unnoticed."""

    def get(self, block: BlockId) -> Buffer | None:
        """Return a page; None for a miss."""

    def clear(self) -> int:
        """Forget all pages. Returns their number."""

    def sweep(self) -> None:
        """Give back what pages took that were forgotten by ``clear``, which may take long."""

    def stats(self) -> dict[str, float]: ...

    def check(self) -> None:
        """Raise AssertionError if a count is wrong."""

    def close(self) -> None: ...


class HostStore:
    """Pages in the host's memory, for the pool of a device.

    Args:
        capacity: largest number of bytes of all pages.
        tier: name of the tier.
        events: records pages that enter and leave the store; None if KV events are off.
    """

    def __init__(
        self,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
        tier: str = "host",
        events: TierEventLog | None = None,
    ) -> None:
        self.tier, self.capacity = tier, capacity
        self._events = events
        self._lock = Lock()
        self._index = TierIndex(capacity, clock)
        self._pages: dict[bytes, tuple[BlockId, Buffer]] = {}
        self._stats = StoreStats()

    def touch(self, key: bytes) -> bool:
        """Note a use of a page. False if it is not here."""
        with self._lock:
            return self._index.touch(key)

    def put(self, block: BlockId, payload: Buffer) -> None:
        """Store a page, which may fail unnoticed."""
        with self._lock:
            removed = self._index.make_room(len(payload))
            if removed is None:
                return
            for key, _ in removed:
                del self._pages[key]
            self._index.add(block.key, block.origin.namespace.tenant, len(payload))
            _note(self._events, self.tier, block, [key for key, _ in removed])
            self._pages[block.key] = block, payload
            self._stats.stored += 1
            self._stats.evicted += len(removed)

    def get(self, block: BlockId) -> Buffer | None:
        """Return a page; None for a miss."""
        with self._lock:
            stored, payload = self._pages.get(block.key, (None, b""))
            if stored != block:
                self._stats.misses += 1
                return None
            self._index.touch(block.key)
            self._stats.hits += 1
            _note(self._events, self.tier, block)
            return payload

    @property
    def is_empty(self) -> bool:
        return not self._pages

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget the given pages that are stored here."""
        with self._lock:
            for key in keys:
                if self._index.remove(key) is not None:
                    del self._pages[key]
                    _note(self._events, self.tier, None, [key])

    def clear(self) -> int:
        """Forget all pages. Returns their number."""
        with self._lock:
            count = len(self._index)
            _note(self._events, self.tier, None, tuple(self._index))
            for key in tuple(self._index):
                self._index.remove(key)
            self._pages.clear()
            return count

    def sweep(self) -> None:
        """Nothing is left."""

    def stats(self) -> dict[str, float]:
        return _stats(self.tier, self._index, self._stats)

    def check(self) -> None:
        """Raise AssertionError if a count is wrong."""
        with self._lock:
            self._index.check()
            assert self._pages.keys() == set(self._index)

    def close(self) -> None:
        self.clear()


class DiskStore:
    """Pages in files, which a later process finds again.

    Args:
        files: files of this process.
        codec: codec of their content.
        capacity: largest number of bytes of all files.
        events: records pages that enter and leave the store; None if KV events are off.
    """

    tier = "disk"

    def __init__(
        self,
        files: BlockFiles,
        codec: BlockCodec,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
        events: TierEventLog | None = None,
    ) -> None:
        self.capacity = capacity
        self._events = events
        self._lock = Lock()
        self._writing = Lock()  # Only its holder adds to the index, so that the bound holds while a file is written.
        self._files = files
        self._codec = codec
        self._clock = clock
        self._index = TierIndex(capacity, clock)
        self._stats = StoreStats()
        self._logged = -_LOG_SECONDS
        self._forgotten: list[tuple[bytes, str]] = []  # key and folder of files that are still to be removed
        for found in files.scan():
            removed = self._index.make_room(found.num_bytes)
            for key, entry in removed or ():
                files.remove(entry.tenant, key)
            if removed is None:
                files.remove(found.folder, found.key)
            else:
                self._index.add(found.key, found.folder, found.num_bytes)

    def touch(self, key: bytes) -> bool:
        """Note a use of a page. False if it is not here."""
        with self._lock:
            return self._index.touch(key)

    def put(self, block: BlockId, payload: Buffer) -> None:
        """Store a page, which may fail unnoticed."""
        folder, parts = self._folder(block), self._codec.encode(block, payload)
        num_bytes = sum(map(len, parts))
        with self._writing:
            self._sweep()
            with self._lock:
                removed = self._index.make_room(num_bytes)
                self._stats.evicted += len(removed or ())
                _note(self._events, self.tier, None, [key for key, _ in removed or ()])
            if removed is None:
                return
            for key, entry in removed:
                self._files.remove(entry.tenant, key)
            try:
                self._files.write(folder, block.key, parts)
            except OSError as error:
                self._fail(block, f"A page of KV was not written: {error}")
                return
            with self._lock:
                self._index.add(block.key, folder, num_bytes)
                self._stats.stored += 1
                _note(self._events, self.tier, block)

    def get(self, block: BlockId) -> Buffer | None:
        """Return a page; None for a miss."""
        with self._lock:
            entry = self._index.get(block.key)
            self._index.touch(block.key)
        if entry is None:
            with self._lock:
                self._stats.misses += 1
            return None
        try:
            payload = self._codec.decode(block, self._files.read(entry.tenant, block.key, entry.num_bytes))
        except FileNotFoundError:
            self._forget(block)
            return None
        except OSError as error:
            self._fail(block, f"A page of KV was not read: {error}")
            self._forget(block)
            return None
        except NotABlock as fault:
            self._reject(block, fault)
            return None
        with self._lock:
            self._stats.hits += 1
            if block.key in self._index:  # it may have been evicted meanwhile
                _note(self._events, self.tier, block)
        return payload

    def clear(self) -> int:
        """Forget all pages. Returns their number."""
        with self._lock:
            entries = [(key, self._index.remove(key)) for key in tuple(self._index)]
            self._forgotten += [(key, entry.tenant) for key, entry in entries if entry is not None]
            _note(self._events, self.tier, None, [key for key, _ in entries])
        return len(entries)

    def sweep(self) -> None:
        """Remove the files of pages that ``clear`` has forgotten."""
        with self._writing:
            self._sweep()

    def _sweep(self) -> None:
        """Remove the files of pages that were forgotten, before a file is written: the bound counts them no more."""
        with self._lock:
            forgotten, self._forgotten = self._forgotten, []
        for key, folder in forgotten:
            self._files.remove(folder, key)

    def stats(self) -> dict[str, float]:
        return _stats(self.tier, self._index, self._stats)

    def check(self) -> None:
        """Raise AssertionError if a count is wrong."""
        with self._lock:
            self._index.check()

    def close(self) -> None:
        self._files.close()

    def _folder(self, block: BlockId) -> str:
        """Return the folder of a tenant's files, whose name does not tell who it is."""
        tenant = block.origin.namespace.tenant.encode("utf-8", "surrogatepass")
        return blake2b(tenant, key=self._codec.scheme.secret, digest_size=8).hexdigest()

    def _fail(self, block: BlockId, text: str) -> None:
        """Forget a page that the system did not read or write."""
        with self._lock:
            self._stats.errors += 1
        self._remove(block)
        self._log(text)

    def _reject(self, block: BlockId, fault: NotABlock) -> None:
        with self._lock:
            self._stats.rejected += 1
        self._forget(block)
        self._log(f"The file {block.key.hex()} is damaged or does not match its name: {fault}")

    def _forget(self, block: BlockId) -> None:
        with self._lock:
            self._stats.misses += 1
        self._remove(block)

    def _remove(self, block: BlockId) -> None:
        """Remove a page and its file, wherever an earlier process or somebody else has put that."""
        with self._lock:
            entry = self._index.remove(block.key)
            _note(self._events, self.tier, None, [block.key])
        self._files.remove(entry.tenant if entry else self._folder(block), block.key)

    def _log(self, text: str) -> None:
        """Log a fault, not each of many."""
        if self._clock() >= self._logged + _LOG_SECONDS:
            self._logged = self._clock()
            logger.warning("%s (further faults are counted, and logged once a minute)", text)


def _note(events: TierEventLog | None, tier: str, stored: BlockId | None, removed: Iterable[bytes] = ()) -> None:
    """Note pages that left a tier, and one that it has; under the lock of the store, so that the order is right."""
    if events is not None:
        events.remove(tier, removed)
        if stored is not None:
            events.store(tier, stored)


def _stats(tier: str, index: TierIndex, stats: StoreStats) -> dict[str, float]:
    return {
        f"kv_bytes_{tier}": index.num_bytes,
        f"kv_capacity_bytes_{tier}": index.capacity,
        f"kv_pages_{tier}": len(index),
        **stats.counters(tier),
    }
