"""KV events: which whole pages enter and leave the prefix tree, in the shape of vLLM's events, for routers elsewhere.

An event is a list, as vLLM's msgspec structs are encoded::

    ["BlockStored", hashes, parent hash, token ids, block size, None, medium, adapter's digest, keys of each block]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

A hash is the first 64 bits of a block key (``block_keys``), so equal hashes mean equal KV also between servers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from ...radix.namespace import Origin
from .block_keys import BlockId, BlockScheme

MEDIUM = "GPU"
"""Of the pool, whatever the device: the word that vLLM's subscribers know for it."""

Event = list[Any]


class KvEventLog:
    """Notes events of one prefix cache in order, for ``take``.

    Args:
        scheme: names of pages.
    """

    def __init__(self, scheme: BlockScheme) -> None:
        self.scheme = scheme
        self._hashes: dict[int, int] = {}  # of the pages in the tree
        self._events: list[Event] = []

    def store(self, blocks: Iterable[BlockId], pages: Iterable[int]) -> None:
        """Note consecutive pages that are in the tree. Those that were noted before are left out."""
        new = [(block, page) for block, page in zip(blocks, pages, strict=True) if page not in self._hashes]
        if not new:
            return
        hashes = [_hash(block.key) for block, _ in new]
        self._hashes |= zip((page for _, page in new), hashes, strict=True)
        first, tokens = new[0][0], array("i")
        for block, _ in new:
            tokens.frombytes(block.tokens)
        parent = None if first.parent == self.scheme.root else _hash(first.parent)
        adapter, keys = new[-1][0].origin.namespace.adapter, [_extra_keys(block.origin) for block, _ in new]
        self._events.append(
            ["BlockStored", hashes, parent, tokens.tolist(), self.scheme.page_size, None, MEDIUM, adapter, keys]
        )

    def remove(self, pages: Iterable[int]) -> None:
        """Note pages that leave the tree; others are passed over."""
        if hashes := [self._hashes.pop(page) for page in pages if page in self._hashes]:
            self._events.append(["BlockRemoved", hashes, MEDIUM])

    def clear(self) -> None:
        """Note that the tree is empty."""
        self._hashes.clear()
        self._events = [["AllBlocksCleared"]]

    @property
    def is_empty(self) -> bool:
        """Whether no page is in the tree."""
        return not self._hashes

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


def _hash(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


@lru_cache(maxsize=1024)
def _extra_keys(origin: Origin) -> list[str]:
    """Return what tells a block's KV from that of the same tokens: digests, tenant, and a hash of the salt."""
    namespace = origin.namespace
    salt = blake2b(namespace.salt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() if namespace.salt else ""
    fields = {"base": namespace.base, "adapter": namespace.adapter, "tenant": namespace.tenant, "salt": salt}
    return [f"{name}={value}" for name, value in fields.items() if value]
