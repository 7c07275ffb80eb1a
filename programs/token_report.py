"""Token report: counts of a session's prompt tokens, prefix cache hits, and generated, drafted and forced tokens."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Report:
    """Tokens of one call, or of all calls of a session.

    Attributes:
        calls: number of calls to the model; a ``select`` counts as one.
        prompt: prompt tokens.
        cached: prompt tokens found in the prefix cache.
        forked: cached tokens that another call, such as that of a sibling branch, was using at the same time.
        completion: generated tokens.
        drafted: generated tokens that were accepted draft tokens.
        forced: generated tokens for which the grammar allowed no other token; some are also drafted.
    """

    calls: int = 0
    prompt: int = 0
    cached: int = 0
    forked: int = 0
    completion: int = 0
    drafted: int = 0
    forced: int = 0

    @property
    def computed(self) -> int:
        return self.prompt - self.cached

    def __add__(self, other: Report) -> Report:
        return Report(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __sub__(self, other: Report) -> Report:
        return Report(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))

    def __str__(self) -> str:
        share = f"{self.cached / self.prompt:.0%}" if self.prompt else "0%"
        return (
            f"{self.calls} calls: {self.cached:,} of {self.prompt:,} prompt tokens ({share}) came from the cache, "
            f"{self.forked:,} of them shared with calls at the same time, {self.computed:,} were computed; "
            f"{self.completion:,} tokens generated, "
            f"{self.drafted:,} of them drafted, {self.forced:,} forced"
        )


class TokenTotals:
    """Thread-safe sum of the reports of all branches' calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = Report()

    def add(self, report: Report) -> None:
        with self._lock:
            self._total += report

    def total(self) -> Report:
        with self._lock:
            return self._total
