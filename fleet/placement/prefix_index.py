"""Prefix index: which replica was sent which prefix, within the size of its KV pool. Known only to the gateway."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .prefix_chain import BLOCK

Indices = npt.NDArray[np.intp]


class PrefixIndex:
    """Blocks of prefixes by replica; each replica has an LRU list of its own.

    A hash maps to a set of replicas as the bits of one integer, so that a lookup costs a few operations for each block
    of the prompt, regardless of the number of replicas.

    Args:
        num_slots: number of indices of replicas; each index is below it.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_bytes = -(-num_slots // 8)
        self._num_slots = num_slots
        self._holders: dict[int, int] = {}
        self._blocks: dict[int, OrderedDict[int, None]] = {}
        self._capacity: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of blocks of all replicas."""
        return sum(map(len, self._blocks.values()))

    def open(self, replica: int, num_tokens: int) -> None:
        """Add a replica whose KV pool holds ``num_tokens`` tokens."""
        self._blocks[replica] = OrderedDict()
        self._capacity[replica] = max(1, num_tokens // BLOCK)

    def close(self, replica: int) -> None:
        """Forget a replica and all of its blocks."""
        for block in self._blocks.pop(replica):
            self._drop(block, replica)
        del self._capacity[replica]

    def add(self, replica: int, chain: Sequence[int]) -> None:
        """Record that a replica was sent a prompt. The last blocks of the prompt are evicted first."""
        blocks, bit = self._blocks[replica], 1 << replica
        for block in reversed(chain[1:]):
            if block not in blocks:
                self._holders[block] = self._holders.get(block, 0) | bit
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._capacity[replica]:
            self._drop(blocks.popitem(last=False)[0], replica)

    def cached(self, chain: Sequence[int]) -> tuple[Indices, int]:
        """Return how many leading tokens of a prompt each replica probably holds, and the depth known to any."""
        tokens = np.zeros(self._num_slots, np.intp)
        seen = deepest = 0
        for depth in range(len(chain) - 1, 0, -1):
            if found := self._holders.get(chain[depth], 0) & ~seen:
                deepest = deepest or depth
                tokens[self._indices(found)] = depth * BLOCK
                seen |= found
        return tokens, deepest

    def _indices(self, bits: int) -> Indices:
        if not bits & (bits - 1):
            return np.array([bits.bit_length() - 1])
        data = np.frombuffer(bits.to_bytes(self._num_bytes, "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(data, bitorder="little"))

    def _drop(self, block: int, replica: int) -> None:
        left = self._holders[block] & ~(1 << replica)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
