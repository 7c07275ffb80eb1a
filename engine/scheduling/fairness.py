"""Fair queueing: a virtual token counter for each tenant counts the tokens computed for the tenant, weighted by cost.

The tenant with the lowest counter is served next: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024,
algorithm 2. When a tenant comes back after a pause, its counter is raised to the lowest counter of the waiting tenants.
So a pause earns the tenant no credit. As long as two tenants both have sequences waiting, their counters differ by at
most::

    U = max(INPUT_WEIGHT * longest prompt, OUTPUT_WEIGHT * tokens of all running sequences)

and their service in any interval differs by at most 2 U. A prefix hit costs a tenth of other prompt tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
CACHED_WEIGHT = 0.1


class TokenCounters:
    """Token counters of all tenants of a priority class. Every operation except ``join`` takes O(1) time."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._last_to_leave = ""

    def served(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def join(self, tenant: str, waiting: Iterable[str]) -> None:
        """Raise the counter of a tenant that begins to wait to the lowest counter of the ``waiting`` tenants."""
        lowest = min(map(self.served, waiting), default=self.served(self._last_to_leave))
        self._served[tenant] = max(self.served(tenant), lowest)

    def leave(self, tenant: str) -> None:
        self._last_to_leave = tenant

    def charge_prompt(self, tenant: str, num_prompt: int, num_cached: int) -> None:
        """Charge a tenant for the prompt of an admitted sequence, of which ``num_cached`` tokens were a prefix hit."""
        self._add(tenant, INPUT_WEIGHT * (num_prompt - num_cached) + CACHED_WEIGHT * num_cached)

    def charge_tokens(self, tenant: str, count: int) -> None:
        self._add(tenant, OUTPUT_WEIGHT * count)

    def _add(self, tenant: str, amount: float) -> None:
        self._served[tenant] = self.served(tenant) + amount
