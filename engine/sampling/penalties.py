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

from ...kernels.layouts.staging import to_device
from ..batch import RowStart
from ..types import SamplingParams
from .draft_verify import SamplingPositions

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
        """Count a generated token, or a draft that has not been verified."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            self._tokens, self._counts = _grown(self._tokens), _grown(self._counts)
        self._tokens[place] = token
        self._counts[place] += 1

    def penalties(self, ahead: Sequence[int] = ()) -> tuple[Ints, Floats, Floats]:
        """As if the tokens ``ahead`` had been generated too: the distinct tokens, and the penalties of each.

        Returns: three arrays [m]: tokens, their repetition penalty, and what frequency and presence penalty subtract.
        """
        known = len(self._place)
        for token in ahead:
            self.add(token)
        held = len(self._place)
        tokens, counts = self._tokens[:held].copy(), self._counts[:held]
        subtract = self.params.frequency_penalty * counts + self.params.presence_penalty * (counts > 0)
        for token in ahead:
            self._counts[self._place[token]] -= 1
        for _ in range(held - known):
            self._place.popitem()
        return tokens, np.full(held, self.params.repetition_penalty, np.float32), subtract.astype(np.float32)


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
        """Whether there is an edit to make in any of these rows where so many tokens are generated."""
        early = self._min_tokens[rows] > num_generated
        return bool((self._biased[rows] | self._penalised[rows] | early).any())

    def apply(self, logits: Tensor, lines: SamplingPositions) -> None:
        """Edit ``logits`` [S, V] in place; row i of them belongs to line i."""
        self._add_biases(logits, lines.row)
        self._penalise(logits, lines)
        self._ban_stops(logits, lines)

    def count(self, row: int, tokens: Sequence[int]) -> None:
        """Count the tokens just generated by a row, if it has penalties."""
        if self._penalised[row]:
            for token in tokens:
                self._counts[row].add(token)

    def _add_biases(self, logits: Tensor, rows: Ints) -> None:
        at = np.flatnonzero(self._biased[rows])
        if not len(at):
            return
        biases = [self._biases[row] for row in rows[at].tolist()]
        places = _places(at, [tokens for tokens, _ in biases], logits.device)
        logits[places] += _join([bias for _, bias in biases], logits.device)

    def _penalise(self, logits: Tensor, lines: SamplingPositions) -> None:
        """logit / r if positive, logit * r if not, minus frequency * count, minus presence if it was generated."""
        at = np.flatnonzero(self._penalised[lines.row])
        if not len(at):
            return
        penalties = [self._counts[int(lines.row[line])].penalties(lines.ahead[line]) for line in at.tolist()]
        places = _places(at, [tokens for tokens, _, _ in penalties], logits.device)
        repetition = _join([factor for _, factor, _ in penalties], logits.device)
        values = logits[places]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[places] = values - _join([subtract for _, _, subtract in penalties], logits.device)

    def _ban_stops(self, logits: Tensor, lines: SamplingPositions) -> None:
        at = np.flatnonzero(self._min_tokens[lines.row] > lines.num_generated)
        if len(at):
            stops = [self._stops[row] for row in lines.row[at].tolist()]
            logits[_places(at, stops, logits.device)] = -torch.inf


def _summed(biases: tuple[tuple[int, float], ...]) -> tuple[Ints, Floats]:
    """Distinct tokens and the sum of the biases of each."""
    tokens, places = np.unique([token for token, _ in biases], return_inverse=True)
    sums = np.bincount(places, weights=[bias for _, bias in biases])
    return tokens.astype(np.int64), sums.astype(np.float32)


def _places(lines: Ints, tokens: list[Ints], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index of all logits (lines[j], t) with t in tokens[j]."""
    repeated = np.repeat(lines, [len(each) for each in tokens])
    return to_device(repeated, device), _join(tokens, device)


def _join(arrays: Iterable[npt.NDArray[np.generic]], device: torch.device) -> Tensor:
    return to_device(np.concatenate(list(arrays)), device)
