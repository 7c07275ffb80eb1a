"""What a session asked for, and what of it was not computed again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Report:
    """Tokens of one call, or of all calls of a session.

    Attributes:
        calls: to the model; a ``select`` is one.
        prompt: tokens of the prompts.
        cached: those of them whose KV was found in the prefix cache.
        forked: those of them that another call was using at that moment, such as that of a branch beside it.
        completion: tokens generated.
        drafted: those of them that were drafted and stood, so that no step of their own was needed.
        forced: those of them that a grammar left no choice about; some may be drafted as well.
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
        """Tokens of the prompts that had to be computed."""
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
    """Adds up the calls of all branches, on whatever threads they run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = Report()

    def add(self, report: Report) -> None:
        """Count a call."""
        with self._lock:
            self._total += report

    def total(self) -> Report:
        """All calls so far."""
        with self._lock:
            return self._total
