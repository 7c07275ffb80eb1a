"""``StepTimer``: seconds of the parts of one step, with one clock reading at the end of each part."""

from __future__ import annotations

from time import perf_counter


class StepTimer:
    """Times consecutive parts of one step; ``seconds`` are by part, in the order in which they first ended."""

    __slots__ = ("_at", "_began", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = self._at = perf_counter()

    def end(self, part: str) -> None:
        """Count the time since the last call as ``part``'s."""
        now = perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._at
        self._at = now

    def skip(self) -> None:
        """Count the time since the last call for no part."""
        self._at = perf_counter()

    def whole(self) -> float:
        return perf_counter() - self._began
