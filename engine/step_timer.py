"""Step timer: seconds of each part of a step, with one clock read at the end of a part."""

from __future__ import annotations

from time import perf_counter


class StepTimer:
    """Times the consecutive parts of one step.

    Attributes:
        seconds: by part, in the order in which the parts first ended.
    """

    __slots__ = ("_at", "_began", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = self._at = perf_counter()

    def end(self, part: str) -> None:
        """Add the time since the last call to ``part``."""
        now = perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._at
        self._at = now

    def skip(self) -> None:
        """Ignore the time since the last call."""
        self._at = perf_counter()

    def whole(self) -> float:
        return perf_counter() - self._began
