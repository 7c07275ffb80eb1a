"""Prints a vector, shortened to one line of a terminal, as vLLM's examples do."""

from __future__ import annotations

from collections.abc import Sequence

_NUM_SHOWN = 4


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print ``prefix``, the first four numbers of a vector, and its size."""
    shown = ", ".join(str(number) for number in embeds[:_NUM_SHOWN])
    print(f"{prefix}: [{shown}{', ...' if len(embeds) > _NUM_SHOWN else ''}] (size={len(embeds)})")
