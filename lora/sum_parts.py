"""``SumPart``: an adapter of a weighted sum, described without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SumPart:
    """One adapter in a weighted sum of adapters, and its weight.

    Attributes:
        name: name under which the adapter is loaded.
        path, trusted: folder of the adapter, as for ``AdapterReader.read``.
        digest: digest of the adapter's content.
    """

    name: str
    path: str
    trusted: bool
    digest: str
    weight: float
