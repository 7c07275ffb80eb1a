"""Adapter index: which replicas are likely to hold which adapters, and each adapter's share of the load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .routing import AdapterColumns

# Each sequence that is routed reduces an adapter's count by this factor.
_SHARE_DECAY = 0.999
_LEAST_COUNT = 0.01
# The share of the load of an adapter is known only after so many sequences.
_FEW = 20
_FORGET_EVERY = 4096  # sequences


class AdapterIndex:
    """Adapters by replica, as far as a gateway can tell from the sequences that it has sent.

    Args:
        num_slots: indices of replicas are below this.
        most_held: adapters that a replica holds on its device.
        load_seconds: that a load takes.
    """

    def __init__(self, num_slots: int, most_held: int, load_seconds: float) -> None:
        self._most_held = most_held
        self._load_seconds = load_seconds
        self._full = np.zeros(num_slots, bool)
        self._sent = np.zeros(num_slots)  # recent sequences of each slot
        self._loaded: dict[str, npt.NDArray[np.bool_]] = {}
        # Sequences by adapter, and when they were last counted.
        self._counts: dict[str, tuple[float, int]] = {}
        self._num_routed = 0

    def open(self, replica: int) -> None:
        """Add a replica, which holds no adapter and was sent nothing."""
        self._full[replica], self._sent[replica] = False, 0.0

    def close(self, replica: int, held: Iterable[str]) -> None:
        """Forget a replica and the adapters that it holds."""
        for adapter in held:
            self._loaded[adapter][replica] = False
        self._full[replica] = False

    def use(self, replica: int, held: OrderedDict[str, None], adapter: str) -> None:
        """Note that a replica has an adapter now; the one that it has not used for longest has left for it.

        Args:
            held: its adapters, the last used ones last; changed here.
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
        """Count a sequence for its replica, and for its adapter's share of the load, which forgets old ones."""
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
        """Return what is known of an adapter at each replica, None without an adapter.

        Args:
            rate: tokens of prefill a second, to express a load in tokens.
            is_open: replicas that take new sequences.
            is_replay: all replicas count as full, so that the sequence goes where its adapter is.
        """
        if adapter is None:
            return None
        nowhere = np.zeros(len(self._full), bool)
        routed = (1 - _SHARE_DECAY ** max(1, self._num_routed)) / (1 - _SHARE_DECAY)
        share = self._counted(adapter) / (routed + _FEW)
        loaded = self._loaded.get(adapter, nowhere)
        # A replica with room counts as if it had the adapter.
        full = ~nowhere if is_replay else self._full
        busy = self._sent * (int(is_open.sum()) / max(1.0, float(self._sent[is_open].sum())))
        return AdapterColumns(loaded, full, self._load_seconds * rate, share, busy)

    def _counted(self, adapter: str) -> float:
        """Return how many of the last sequences, about ``1 / (1 - _SHARE_DECAY)``, had an adapter."""
        count, at = self._counts.get(adapter, (0.0, 0))
        return count * _SHARE_DECAY ** (self._num_routed - at)
