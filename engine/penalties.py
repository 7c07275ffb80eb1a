"""Edits of single logits: ``logit_bias``, the three penalties, and stop tokens that may not come yet.

All of them touch few tokens of a row, so they are kept as lists of tokens, never as lines over the vocabulary: a row
with penalties holds at most the distinct tokens of its sequence, a row without holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import RowStart
from engine.types import SamplingParams

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
_T = TypeVar("_T", bound=np.generic)


class TokenCounts:
    """The distinct tokens of one sequence that its penalties concern, and how often each was generated.

    Tokens that stand only in the prompt count 0; they are held if there is a repetition penalty.
    """

    def __init__(self, prompt: Sequence[int], generated: Sequence[int], params: SamplingParams) -> None:
        seen = prompt if params.repetition_penalty != 1.0 else ()
        tokens = np.unique(np.concatenate([np.asarray(seen, np.int64), np.asarray(generated, np.int64)]))
        self.params = params
        self._place = {token: place for place, token in enumerate(tokens.tolist())}
        self._tokens: Ints = tokens
        self._counts: Floats = np.zeros(len(tokens), np.float32)
        for token in generated:
            self._counts[self._place[token]] += 1

    def add(self, token: int) -> None:
        """Count a generated token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            self._tokens, self._counts = _grown(self._tokens), _grown(self._counts)
        self._tokens[place] = token
        self._counts[place] += 1

    @property
    def tokens(self) -> Ints:
        """The distinct tokens, [m]."""
        return self._tokens[: len(self._place)]

    @property
    def penalties(self) -> tuple[Floats, Floats]:
        """For each of ``tokens``: the repetition penalty, and what frequency and presence penalty subtract."""
        counts = self._counts[: len(self._place)]
        subtract = self.params.frequency_penalty * counts + self.params.presence_penalty * (counts > 0)
        return np.full(len(counts), self.params.repetition_penalty, np.float32), subtract.astype(np.float32)


def _grown(values: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """A copy with room for as many again, at least 16, zeroed."""
    return np.concatenate([values, np.zeros(max(16, len(values)), values.dtype)])


class LogitEdits:
    """The edits of all rows. ``start`` replaces a row's edits; ``apply`` changes the logits of a step."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biases: dict[int, tuple[Ints, Floats]] = {}
        self._counts: dict[int, TokenCounts] = {}
        self._stops: dict[int, Ints] = {}
        self._biased = np.zeros(max_num_seqs, bool)
        self._penalised = np.zeros(max_num_seqs, bool)
        self._min_tokens = np.zeros(max_num_seqs, np.int64)

    def start(self, start: RowStart) -> None:
        """Take over a row's parameters and tokens; what was there before is forgotten."""
        row, params = start.row, start.params
        for held in (self._biases, self._counts, self._stops):
            held.pop(row, None)
        self._biased[row] = bool(params.logit_bias)
        self._penalised[row] = params.needs_counts
        self._min_tokens[row] = params.min_tokens
        if params.logit_bias:
            self._biases[row] = _summed(params.logit_bias)
        if params.needs_counts:
            prompt, generated = start.tokens[: start.num_prompt], start.tokens[start.num_prompt :]
            self._counts[row] = TokenCounts(prompt, generated, params)
        if params.min_tokens:
            # An id beyond the vocabulary cannot be drawn: there is nothing to ban.
            self._stops[row] = np.array([id_ for id_ in set(start.stop_ids) if id_ < self._vocab_size], np.int64)

    def concern(self, rows: Ints, num_generated: Ints) -> bool:
        """Whether any of the rows has an edit to make in this step."""
        early = self._min_tokens[rows] > num_generated
        return bool((self._biased[rows] | self._penalised[rows] | early).any())

    def apply(self, logits: Tensor, rows: Ints, num_generated: Ints) -> None:
        """Edit ``logits`` [S, V] in place; row i of them belongs to ``rows[i]``."""
        self._add_biases(logits, rows)
        self._penalise(logits, rows)
        self._ban_stops(logits, rows, num_generated)

    def count(self, rows: Ints, tokens: Sequence[int], failed: Sequence[bool]) -> None:
        """Count the tokens just drawn for the rows that have penalties."""
        for i in np.flatnonzero(self._penalised[rows]).tolist():
            if not failed[i]:
                self._counts[int(rows[i])].add(tokens[i])

    def _add_biases(self, logits: Tensor, rows: Ints) -> None:
        lines = np.flatnonzero(self._biased[rows])
        if not len(lines):
            return
        biases = [self._biases[row] for row in rows[lines].tolist()]
        at = _places(lines, [tokens for tokens, _ in biases], logits.device)
        logits[at] += _join([bias for _, bias in biases], logits.device)

    def _penalise(self, logits: Tensor, rows: Ints) -> None:
        """logit / r if positive, logit * r if not, minus frequency * count, minus presence if it was generated."""
        lines = np.flatnonzero(self._penalised[rows])
        if not len(lines):
            return
        counts = [self._counts[row] for row in rows[lines].tolist()]
        at = _places(lines, [each.tokens for each in counts], logits.device)
        penalties = [each.penalties for each in counts]
        repetition = _join([factor for factor, _ in penalties], logits.device)
        values = logits[at]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[at] = values - _join([subtract for _, subtract in penalties], logits.device)

    def _ban_stops(self, logits: Tensor, rows: Ints, num_generated: Ints) -> None:
        lines = np.flatnonzero(self._min_tokens[rows] > num_generated)
        if len(lines):
            stops = [self._stops[row] for row in rows[lines].tolist()]
            logits[_places(lines, stops, logits.device)] = -torch.inf


def _summed(biases: tuple[tuple[int, float], ...]) -> tuple[Ints, Floats]:
    """Distinct tokens and the sum of the biases of each."""
    tokens, places = np.unique([token for token, _ in biases], return_inverse=True)
    sums = np.bincount(places, weights=[bias for _, bias in biases])
    return tokens.astype(np.int64), sums.astype(np.float32)


def _places(lines: Ints, tokens: list[Ints], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index of all logits (lines[j], t) with t in tokens[j]."""
    repeated = np.repeat(lines, [len(each) for each in tokens])
    return torch.from_numpy(repeated).to(device, non_blocking=True), _join(tokens, device)


def _join(arrays: Iterable[npt.NDArray[np.generic]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(list(arrays))).to(device, non_blocking=True)
