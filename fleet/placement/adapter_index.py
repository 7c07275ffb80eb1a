"""Adapter index: which replicas are likely to hold which adapters, and each adapter's share of the load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .routing import AdapterColumns

# Each routed sequence multiplies an adapter's count by this factor.
_SHARE_DECAY = 0.999
_LEAST_COUNT = 0.01
# Number of sequences from which on an adapter's share of the load counts as known.
_FEW = 20
_FORGET_EVERY = 4096  # sequences


class AdapterIndex:
    """Adapters by replica, estimated by a gateway from the sequences that it has sent.

    Args:
        num_slots: number of indices of replicas; each index is below it.
        most_held: largest number of adapters that a replica holds on its device.
        load_seconds: seconds that a load takes.
    """

    def __init__(self, num_slots: int, most_held: int, load_seconds: float) -> None:
        self._most_held = most_held
        self._load_seconds = load_seconds
        self._full = np.zeros(num_slots, bool)
        self._sent = np.zeros(num_slots)  # recent sequences of each slot
        self._loaded: dict[str, npt.NDArray[np.bool_]] = {}
        # Count of sequences by adapter, and the index of the sequence at which it was last updated.
        self._counts: dict[str, tuple[float, int]] = {}
        self._num_routed = 0

    def open(self, replica: int) -> None:
        """Add a replica, which holds no adapter yet and was sent no sequence."""
        self._full[replica], self._sent[replica] = False, 0.0

    def close(self, replica: int, held: Iterable[str]) -> None:
        """Forget a replica and the adapters that it holds."""
        for adapter in held:
            self._loaded[adapter][replica] = False
        self._full[replica] = False

    def use(self, replica: int, held: OrderedDict[str, None], adapter: str) -> None:
        """Record that a replica has an adapter now; if it is full, its least recently used adapter is removed.

        Args:
            held: the replica's adapters, the most recently used last; changed here.
        """
        if adapter not in self._loaded:
            self._loaded[adapter] = np.zeros(len(self._full), bool)
        self._loaded[adapter][replica] = True
        held[adapter] = None
        held.move_to_end(adapter)
        while len(held) > self._most_held:
            gone, _ = held.popitem(last=False)
            self._loaded[gone][replica] = False
        self._full[replica] = len(held) >= self._most_held

    def count(self, replica: int, adapter: str | None) -> None:
        """Count a sequence for its replica, and for its adapter's share of the load; old sequences lose weight."""
        self._num_routed += 1
        if adapter is not None:
            self._counts[adapter] = self._counted(adapter) + 1.0, self._num_routed
        if self._num_routed % _FORGET_EVERY == 0:
            for name in [name for name in self._counts if self._counted(name) < _LEAST_COUNT]:
                del self._counts[name]
            self._loaded = {name: loaded for name, loaded in self._loaded.items() if loaded.any()}
        self._sent *= _SHARE_DECAY
        self._sent[replica] += 1.0

    def columns(
        self, adapter: str | None, rate: float, is_open: npt.NDArray[np.bool_], *, is_replay: bool
    ) -> AdapterColumns | None:
        """Return an adapter's data at each replica, None without an adapter.

        Args:
            rate: tokens of prefill per second, to express a load in tokens.
            is_open: whether each replica takes new sequences.
            is_replay: whether all replicas count as full, so that the sequence is sent where its adapter is.
        """
        if adapter is None:
            return None
        nowhere = np.zeros(len(self._full), bool)
        routed = (1 - _SHARE_DECAY ** max(1, self._num_routed)) / (1 - _SHARE_DECAY)
        share = self._counted(adapter) / (routed + _FEW)
        loaded = self._loaded.get(adapter, nowhere)
        # A replica with a free slot counts as if it had the adapter.
        full = ~nowhere if is_replay else self._full
        busy = self._sent * (int(is_open.sum()) / max(1.0, float(self._sent[is_open].sum())))
        return AdapterColumns(loaded, full, self._load_seconds * rate, share, busy)

    def _counted(self, adapter: str) -> float:
        """Return the number of the last ``1 / (1 - _SHARE_DECAY)`` sequences, approximately, that had an adapter."""
        count, at = self._counts.get(adapter, (0.0, 0))
        return count * _SHARE_DECAY ** (self._num_routed - at)
