"""Statistics of a fleet: gauges and counters of all replicas, summed as for one engine; counters never decrease."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

_GAUGES = frozenset(
    (
        *("engines", "row_limit", "rows_usable", "prefill_tokens_per_second", "prefill_pairs_per_second"),
        *("prefill_short_tokens", "prefilling_tokens", "prefilling_pairs", "waiting_deferred_tokens"),
        *("running", "waiting", "waiting_deferred", "sessions", "pins", "grammar_pending", "grammar_cached_bytes"),
        *("pages", "pages_free", "pages_available", "pages_cached", "pages_private"),
        *("pages_of_sessions", "pages_pinned"),
        *("kv_bytes_host", "kv_capacity_bytes_host", "kv_pages_host", "kv_pages_to_write", "kv_held_host"),
        *("kv_bytes_disk", "kv_capacity_bytes_disk", "kv_pages_disk", "kv_held_disk"),
        *("adapters", "adapters_loading", "adapters_resident", "adapters_pinned", "adapters_host_bytes"),
    )
)


class FleetStats:
    """Numbers by a replica's index. When a replica has ended, its index is used again and its counters are kept."""

    def __init__(self) -> None:
        self._gone: dict[int, Counter[str]] = {}

    def retire(self, index: int, stats: Mapping[str, float]) -> None:
        """Keep the counters of a replica that has ended."""
        counted = {name: value for name, value in stats.items() if name not in _GAUGES}
        self._gone.setdefault(index, Counter()).update(counted)

    def by_index(self, replicas: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, float]]:
        """Return the numbers of each index that a replica has or had, with the present numbers of running replicas."""
        sums: dict[int, dict[str, float]] = {}
        for index in sorted(self._gone.keys() | replicas.keys()):
            counted = Counter(self._gone.get(index, {}))
            counted.update(replicas.get(index, {}))
            sums[index] = dict(counted)
        return sums

    def total(self, replicas: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
        """Return the sums over all replicas."""
        sums: Counter[str] = Counter()
        for stats in self.by_index(replicas).values():
            sums.update(stats)
        return dict(sums)
