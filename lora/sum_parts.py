"""``SumPart``: an adapter of a weighted sum, told without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SumPart:
    """An adapter of a sum.

    Attributes:
        name: under which it is loaded.
        path, trusted: of its folder, as ``AdapterReader.read`` takes them.
        digest: digest of its content.
    """

    name: str
    path: str
    trusted: bool
    digest: str
    weight: float
