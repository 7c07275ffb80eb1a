"""Virtual token counters: what each tenant has been served, in tokens weighed by what they cost.

The tenant with the lowest counter is served next, as in Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024, algorithm 2. One who comes back after a pause is lifted to the lowest of those who wait: a pause is not
saved up. As long as two tenants both have sequences waiting, their counters differ by at most::

    U = max(INPUT_WEIGHT * longest prompt, OUTPUT_WEIGHT * tokens of all running sequences)

and what they are served in any interval by at most 2 U. Tokens found in the prefix cache cost a tenth of the others.
"""

from __future__ import annotations

from collections.abc import Iterable

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
CACHED_WEIGHT = 0.1


class TokenCounters:
    """The counters of all tenants of a band. Every operation but ``join`` is O(1)."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._last_to_leave = ""

    def served(self, tenant: str) -> float:
        """The counter of a tenant."""
        return self._served.get(tenant, 0.0)

    def join(self, tenant: str, waiting: Iterable[str]) -> None:
        """A tenant of whom nothing waited has a sequence now; ``waiting`` are the others of whom something waits."""
        lowest = min(map(self.served, waiting), default=self.served(self._last_to_leave))
        self._served[tenant] = max(self.served(tenant), lowest)

    def leave(self, tenant: str) -> None:
        """Nothing of a tenant waits any more."""
        self._last_to_leave = tenant

    def charge_prompt(self, tenant: str, num_prompt: int, num_cached: int) -> None:
        """A sequence was admitted: its prompt, and how much of it was in the cache."""
        self._add(tenant, INPUT_WEIGHT * (num_prompt - num_cached) + CACHED_WEIGHT * num_cached)

    def charge_tokens(self, tenant: str, count: int) -> None:
        """So many tokens were drawn."""
        self._add(tenant, OUTPUT_WEIGHT * count)

    def _add(self, tenant: str, amount: float) -> None:
        self._served[tenant] = self.served(tenant) + amount
