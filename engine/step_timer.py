"""Where the time of a step goes, taken as it passes: one look at the clock where a part ends."""

from __future__ import annotations

from time import perf_counter


class StepTimer:
    """The parts of one step, one after the other; what is not named in between is in none.

    Attributes:
        seconds: by part, in the order in which they first ended.
    """

    __slots__ = ("_at", "_began", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = self._at = perf_counter()

    def end(self, part: str) -> None:
        """The time since the last call belongs to ``part``."""
        now = perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._at
        self._at = now

    def skip(self) -> None:
        """The time since the last call belongs to no part."""
        self._at = perf_counter()

    def whole(self) -> float:
        """Seconds since the beginning."""
        return perf_counter() - self._began
