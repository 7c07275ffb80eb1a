"""Grammar index: which replicas were sent which grammars and so have compiled them. Known only to the gateway."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

MOST_GRAMMARS = 512
"""Number of a replica's grammars that are remembered, the last used ones. If the replica has dropped one of them, it
only has to compile it again."""


def grammar_key(grammar: tuple[str, bytes] | None) -> int:
    """Return a 64-bit hash of a grammar's kind and content, the same in every process; 0 for none."""
    if grammar is None:
        return 0
    kind, content = grammar
    return int.from_bytes(hashlib.blake2b(kind.encode() + b"\0" + content, digest_size=8).digest(), "little") or 1


class GrammarIndex:
    """Grammars by replica; each replica has an LRU list of its own.

    Args:
        num_slots: number of indices of replicas; each index is below it.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._holders: dict[int, npt.NDArray[np.bool_]] = {}
        self._held: dict[int, OrderedDict[int, None]] = {}
        self._proven: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Number of grammars of all replicas."""
        return sum(map(len, self._held.values()))

    def open(self, replica: int) -> None:
        """Add a replica without grammars."""
        self._held[replica] = OrderedDict()

    def close(self, replica: int) -> None:
        """Forget a replica."""
        for key in self._held.pop(replica):
            self._drop(replica, key)

    def add(self, replica: int, key: int) -> None:
        """Record that a replica was sent a grammar."""
        held = self._held[replica]
        if key not in held:
            self._holders.setdefault(key, np.zeros(self._num_slots, bool))[replica] = True
        held[key] = None
        held.move_to_end(key)
        if len(held) > MOST_GRAMMARS:
            self._drop(replica, held.popitem(last=False)[0])

    def prove(self, key: int) -> None:
        """Record that an answer has begun under a grammar: its compilation harms no replica."""
        self._proven[key] = None
        self._proven.move_to_end(key)
        if len(self._proven) > MOST_GRAMMARS:
            self._proven.popitem(last=False)

    def is_proven(self, key: int) -> bool:
        """Return whether a grammar has been compiled and used before; True for no grammar."""
        return not key or key in self._proven

    def holders(self, key: int) -> npt.NDArray[np.bool_]:
        """Return for each replica whether it has probably compiled a grammar."""
        found = self._holders.get(key)
        return np.zeros(self._num_slots, bool) if found is None else found

    def _drop(self, replica: int, key: int) -> None:
        self._holders[key][replica] = False
        if not self._holders[key].any():
            del self._holders[key]
