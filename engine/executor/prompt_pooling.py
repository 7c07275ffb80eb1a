"""Pooling of prompts: sums of hidden states over the steps that compute a prompt, and the embedding made from them.

The kinds of pooling and their names are those of sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from ..batch import Batch, RowStart
from ..loading.pooling_layers import DenseLayer
from ..types import PoolingMode, SamplingParams


@dataclass(slots=True)
class PromptSums:
    """Running sums of the hidden states of a prompt, by kind of pooling.

    Attributes:
        sums: [H] fp32 for each kind.
        count: number of tokens so far.
        weight: sum of the weights of these tokens. The weight of a token is its position, counted from 1.
    """

    sums: dict[PoolingMode, Tensor] = field(default_factory=dict)
    count: int = 0
    weight: float = 0.0

    def add(self, modes: Sequence[PoolingMode], hidden: Tensor, first: int) -> None:
        """Add the hidden states [n, H] fp32 of n > 0 tokens, of which the first has the position ``first``."""
        for mode in modes:
            self.sums[mode] = _ADDED[mode](self.sums.get(mode), hidden, first)
        num = len(hidden)
        self.count += num
        self.weight += num * (first + 1) + num * (num - 1) / 2

    def pooled(self, modes: Sequence[PoolingMode]) -> Tensor:
        """Return the pooled values of all tokens: [number of modes * H]."""
        divisors = {"mean": self.count, "mean_sqrt_len_tokens": self.count**0.5, "weightedmean": self.weight}
        return torch.cat([self.sums[mode] / divisors.get(mode, 1.0) for mode in modes])


def _total(total: Tensor | None, hidden: Tensor, _first: int) -> Tensor:
    added = hidden.sum(0)
    return added if total is None else total + added


def _weighted(total: Tensor | None, hidden: Tensor, first: int) -> Tensor:
    weights = torch.arange(first + 1, first + 1 + len(hidden), dtype=hidden.dtype, device=hidden.device)
    added = weights @ hidden
    return added if total is None else total + added


def _largest(largest: Tensor | None, hidden: Tensor, _first: int) -> Tensor:
    found = hidden.amax(0)
    return found if largest is None else torch.maximum(largest, found)


def _first(kept: Tensor | None, hidden: Tensor, _first: int) -> Tensor:
    return hidden[0].clone() if kept is None else kept


def _last(_kept: Tensor | None, hidden: Tensor, _first: int) -> Tensor:
    # A copy, as the next step's forward pass overwrites the hidden states.
    return hidden[-1].clone()


_ADDED: Final[Mapping[PoolingMode, Callable[[Tensor | None, Tensor, int], Tensor]]] = {
    "cls": _first,
    "max": _largest,
    "mean": _total,
    "mean_sqrt_len_tokens": _total,
    "weightedmean": _weighted,
    "lasttoken": _last,
}


class PromptPooling:
    """Pools the prompts of rows whose parameters request it.

    Args:
        modes: kinds of pooling, whose results are concatenated.
        dense: linear layers that are applied to the pooled values, in order.
    """

    def __init__(self, modes: Sequence[PoolingMode] = ("lasttoken",), dense: Sequence[DenseLayer] = ()) -> None:
        self._modes = modes
        self._dense = dense
        self._params: dict[int, SamplingParams] = {}  # Parameters of the rows whose prompts are pooled.
        self._sums: dict[int, PromptSums] = {}

    def start(self, starts: Sequence[RowStart]) -> None:
        """Begin the sums of rows that are assigned to new sequences; the sums of earlier sequences are dropped."""
        for start in starts:
            self._params.pop(start.row, None)
            self._sums.pop(start.row, None)
            if start.params.pooling:
                self._params[start.row] = start.params
                self._sums[start.row] = PromptSums()

    def forced(self, batch: Batch) -> dict[int, int]:
        """Return the sampling positions of pooled rows, each with a token that is forced there: any will do."""
        found: dict[int, int] = {}
        position = 0
        for row in batch.rows if self.is_used else ():
            if row.draws and row.row in self._params:
                found[position] = 0
            position += row.num_positions
        return found

    @property
    def is_used(self) -> bool:
        """Whether the prompt of any row is pooled."""
        return bool(self._params)

    def pools(self, row: int) -> bool:
        """Return whether the prompt of a row is pooled."""
        return row in self._params

    def classifies(self, row: int) -> bool:
        """Return whether the classification head is applied to what is pooled of a row, its last hidden state."""
        return self._params[row].pooling == "classify"

    def add(self, row: int, hidden: Tensor, first: int) -> None:
        """Add hidden states [n, H] of a row's prompt, the first one that of position ``first``."""
        self._sums[row].add(self._modes_of(row), hidden.to(torch.float32), first)

    def pooled(self, row: int) -> Tensor:
        """Return the pooled values of the whole prompt of a row, fp32."""
        found = self._sums[row].pooled(self._modes_of(row))
        if self._params[row].pooling == "embed":
            for layer in self._dense:
                found = layer(found)
        return found

    def _modes_of(self, row: int) -> Sequence[PoolingMode]:
        return self._modes if self._params[row].pooling == "embed" else ("lasttoken",)
