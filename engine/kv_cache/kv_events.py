"""KV events: report which whole pages enter and leave pool and tiers, in the form of vLLM's events, for routers.

An event is a list, as vLLM's msgspec structs are encoded::

    ["BlockStored", hashes, parent hash, token ids, block size, None, medium, adapter's digest, keys of each block]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

The medium is ``GPU`` for the pool, ``CPU`` for the tier of host memory, ``DISK`` for that of files. A hash is the first
64 bits of a block key (``block_keys``), so equal hashes mean equal KV also between servers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from threading import Lock
from typing import Any

from ...radix.namespace import Origin
from .block_keys import BlockId, BlockScheme

MEDIUM = "GPU"
"""Of the pool, whatever the device: the word that vLLM's subscribers know for it."""

TIER_MEDIA = {"host": "CPU", "disk": "DISK"}
"""By tier."""

Event = list[Any]


class TierEventLog:
    """Notes events of the stores beside the pool in order, on any thread. Recurrent states are passed over."""

    def __init__(self) -> None:
        self._lock = Lock()
        # What subscribers know of each tier. A file of an earlier process is noted when it is read.
        self._hashes: dict[str, set[int]] = {tier: set() for tier in TIER_MEDIA}
        # A page that a tier has, or hashes of those that it has no more.
        self._events: list[tuple[str, BlockId | list[int]]] = []

    def store(self, tier: str, block: BlockId) -> None:
        """Note a page that a tier has. One that was noted before is passed over."""
        new = _hash(block.key)
        with self._lock:
            if not block.is_state and new not in self._hashes[tier]:
                self._hashes[tier].add(new)
                self._events.append((tier, block))

    def remove(self, tier: str, keys: Iterable[bytes]) -> None:
        """Note pages that leave a tier; those that were never noted are passed over."""
        with self._lock:
            known = self._hashes[tier]
            if gone := [each for each in map(_hash, keys) if each in known]:
                known.difference_update(gone)
                self._events.append((tier, gone))

    def clear(self) -> None:
        """Forget what was noted, as subscribers are told that there is nothing."""
        with self._lock:
            self._events.clear()
            for known in self._hashes.values():
                known.clear()

    def take(self, scheme: BlockScheme) -> list[Event]:
        """Return the events since the last call. ``scheme`` has named the pages."""
        with self._lock:
            events, self._events = self._events, []
        return [
            _stored(scheme, [what], TIER_MEDIA[tier])
            if isinstance(what, BlockId)
            else ["BlockRemoved", what, TIER_MEDIA[tier]]
            for tier, what in events
        ]


class KvEventLog:
    """Records the events of one prefix cache in order, for ``take``.

    Args:
        scheme: naming scheme of the pages.
        tiers: events of the tiers, which ``take`` returns too; None without tiers.
    """

    def __init__(self, scheme: BlockScheme, tiers: TierEventLog | None = None) -> None:
        self.scheme = scheme
        self._tiers = tiers
        self._hashes: dict[int, int] = {}  # Hashes of the pages in the tree.
        self._events: list[Event] = []

    def store(self, blocks: Iterable[BlockId], pages: Iterable[int]) -> None:
        """Note consecutive pages that are in the tree. Those that were noted before are left out."""
        new = [(block, page) for block, page in zip(blocks, pages, strict=True) if page not in self._hashes]
        if not new:
            return
        self._hashes |= {page: _hash(block.key) for block, page in new}
        self._events.append(_stored(self.scheme, [block for block, _ in new], MEDIUM))

    def remove(self, pages: Iterable[int]) -> None:
        """Note pages that leave the tree; others are passed over."""
        if hashes := [self._hashes.pop(page) for page in pages if page in self._hashes]:
            self._events.append(["BlockRemoved", hashes, MEDIUM])

    def clear(self) -> None:
        """Note that the tree is empty. Subscribers forget the tiers too: what is read there is noted anew."""
        self._hashes.clear()
        self._events = [["AllBlocksCleared"]]
        if self._tiers:
            self._tiers.clear()

    @property
    def is_empty(self) -> bool:
        """Whether no page is in the tree."""
        return not self._hashes

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events + self._tiers.take(self.scheme) if self._tiers else events


def _stored(scheme: BlockScheme, blocks: list[BlockId], medium: str) -> Event:
    """Return the event of consecutive pages."""
    tokens = array("i", b"".join(block.tokens for block in blocks))
    parent = None if blocks[0].parent == scheme.root else _hash(blocks[0].parent)
    adapter, keys = blocks[-1].origin.namespace.adapter, [_extra_keys(block.origin) for block in blocks]
    hashes = [_hash(block.key) for block in blocks]
    return ["BlockStored", hashes, parent, tokens.tolist(), scheme.page_size, None, medium, adapter, keys]


def _hash(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


@lru_cache(maxsize=1024)
def _extra_keys(origin: Origin) -> list[str]:
    """Return what tells a block's KV from that of the same tokens: digests, tenant, and a hash of the salt."""
    namespace = origin.namespace
    salt = blake2b(namespace.salt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() if namespace.salt else ""
    fields = {"base": namespace.base, "adapter": namespace.adapter, "tenant": namespace.tenant, "salt": salt}
    return [f"{name}={value}" for name, value in fields.items() if value]
