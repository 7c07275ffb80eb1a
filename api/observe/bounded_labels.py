"""Bounded labels: limit the number of values of a metric's label, because some of these values come from clients."""

from __future__ import annotations

from collections.abc import Callable, Container

OTHER = "(other)"
"""Represents all values beyond the limit. No adapter can have this name."""


class BoundedLabels:
    """Limits the values of a label. The first ``most`` values are used unchanged; later ones become ``OTHER``.

    Args:
        most: largest number of values with a series of their own.
        drop: removes the series of a value, so that another value can get one.
    """

    def __init__(self, most: int, drop: Callable[[str], None] = lambda value: None) -> None:
        self._most = most
        self._drop = drop
        self._values: set[str] = set()

    def label(self, value: str, living: Container[str] | None = None) -> str:
        """Return the label of a value.

        Args:
            living: values that may keep a series; None for all. If ``most`` values have a series, the series of values
                that are not in ``living`` are removed.
        """
        if value in self._values:
            return value
        if living is not None and value not in living:
            return OTHER
        if len(self._values) >= self._most and living is not None:
            for gone in [each for each in self._values if each not in living]:
                self._values.remove(gone)
                self._drop(gone)
        if len(self._values) >= self._most:
            return OTHER
        self._values.add(value)
        return value
