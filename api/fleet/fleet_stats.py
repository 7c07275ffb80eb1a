"""Statistics of a fleet: gauges and counters of all replicas as those of one engine; counters never go back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

_GAUGES = frozenset(
    (
        *("running", "waiting", "waiting_deferred", "sessions", "pins", "grammar_pending", "grammar_cached_bytes"),
        *("pages", "pages_free", "pages_available", "pages_cached", "pages_private"),
        *("pages_of_sessions", "pages_pinned"),
        *("adapters", "adapters_loading", "adapters_resident", "adapters_pinned", "adapters_host_bytes"),
    )
)


class FleetStats:
    """Sums over replicas; what replicas that are gone had counted stays."""

    def __init__(self) -> None:
        self._gone: Counter[str] = Counter()

    def retire(self, stats: Mapping[str, float]) -> None:
        """Keep the counters of a replica that is lost."""
        self._gone.update({name: value for name, value in stats.items() if name not in _GAUGES})

    def total(self, replicas: Iterable[Mapping[str, float]]) -> dict[str, float]:
        """Return the sums, with what these replicas say now."""
        sums = Counter(self._gone)
        for stats in replicas:
            sums.update(stats)
        return dict(sums)
