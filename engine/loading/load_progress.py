"""Progress bar of a model's load in a terminal: bytes of the layers that have been read, of all."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

from tqdm import tqdm

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")


class _Bar(tqdm):  # type: ignore[misc]
    """A progress bar without tqdm's thread: engine processes are forked from one that has loaded the weights."""

    monitor_interval = 0


class LoadProgress:
    """Shows how much of a model has been read, if standard error is a terminal; otherwise shows nothing.

    Args:
        sizes: bytes of each tensor.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._layers: Counter[int | None] = Counter()
        for name, size in sizes.items():
            found = _LAYER.match(name)
            self._layers[int(found[1]) if found else None] += size
        self._bar = _Bar(
            desc="Loading weights",
            total=self._layers.total(),
            unit="B",
            unit_scale=True,
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def read(self, layer: int | None) -> None:
        """Count the tensors of a layer as read; with None, the tensors outside of layers."""
        self._bar.update(self._layers[layer])
