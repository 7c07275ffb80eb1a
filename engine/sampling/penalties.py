"""Edits of single logits: allowed tokens, ``logit_bias``, penalties, stop tokens before ``min_tokens``, ``bad_words``.

Each row keeps a list of the tokens whose logits it edits, never a vector over the vocabulary. With penalties the list
has at most as many entries as the sequence has distinct tokens; without edits it is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.layouts.logit_edits import Edits, Part, pack_edits
from ...kernels.layouts.staging import to_device
from ...kernels.sampling_ops import edit_logits, has_kernel, mask_logits
from ..batch import RowStart
from ..types import SamplingParams
from .draft_verify import SamplingPositions

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.int32]
_T = TypeVar("_T", bound=np.generic)


class TokenCounts:
    """Counts of generated tokens of one sequence with penalties.

    Tokens that occur only in the prompt count 0, and are kept only if there is a repetition penalty.
    """

    def __init__(self, prompt: Sequence[int], generated: Sequence[int], params: SamplingParams) -> None:
        seen = prompt if params.repetition_penalty != 1.0 else ()
        tokens = np.unique(np.concatenate([np.asarray(seen, np.int64), np.asarray(generated, np.int64)]))
        self.params = params
        self._index = {token: index for index, token in enumerate(tokens.tolist())}
        self._tokens: Ints = tokens
        self._counts: Floats = np.zeros(len(tokens), np.float32)
        for token in generated:
            self._counts[self._index[token]] += 1

    def add(self, token: int) -> None:
        """Count a generated token, or a draft that has not been verified."""
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._tokens):
            self._tokens, self._counts = _grown(self._tokens), _grown(self._counts)
        self._tokens[index] = token
        self._counts[index] += 1

    def penalties(self, drafts: Sequence[int] = ()) -> tuple[Ints, Floats, Floats]:
        """Return the penalties of all m distinct tokens as if ``drafts`` had been generated too.

        Returns:
            Three arrays [m]: tokens, their repetition penalty, and the sum that frequency and presence penalty
            subtract.
        """
        known = len(self._index)
        for token in drafts:
            self.add(token)
        held = len(self._index)
        tokens, counts = self._tokens[:held].copy(), self._counts[:held]
        subtract = self.params.frequency_penalty * counts + self.params.presence_penalty * (counts > 0)
        for token in drafts:
            self._counts[self._index[token]] -= 1
        for _ in range(held - known):
            self._index.popitem()
        return tokens, np.full(held, self.params.repetition_penalty, np.float32), subtract.astype(np.float32)


class BadWords:
    """The words that one sequence may not end with, and the end of its answer.

    Args:
        words: words of at least one token, all within the vocabulary.
        generated: the tokens of the answer so far.
    """

    def __init__(self, words: Iterable[Sequence[int]], generated: Sequence[int]) -> None:
        self._single: Ints = np.unique([word[0] for word in words if len(word) == 1]).astype(np.int64)
        self._longer: dict[int, list[tuple[list[int], int]]] = {}  # by the last token but one
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        self._kept = max(map(len, words)) - 1
        self._end = list(generated[-self._kept :]) if self._kept else []

    def add(self, tokens: Sequence[int]) -> None:
        """Append generated tokens to the answer."""
        if self._kept:
            self._end = [*self._end, *tokens][-self._kept :]

    def banned(self, drafts: Sequence[int] = ()) -> Ints:
        """Return the tokens, each once, that would end a word if ``drafts`` had been generated too."""
        end = [*self._end, *drafts]
        ending = self._longer.get(end[-1], ()) if end else ()
        found = [last for before, last in ending if end[-len(before) :] == before]
        return np.union1d(self._single, np.array(found, np.int64)) if found else self._single


def _grown(values: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """Return a copy with at least 16 more zeros, and at least double the length."""
    return np.concatenate([values, np.zeros(max(16, len(values)), values.dtype)])


class LogitEdits:
    """The edits of all rows. ``start`` replaces a row's edits; ``apply`` changes the logits of a step."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biases: dict[int, tuple[Ints, Floats]] = {}
        self._counts: dict[int, TokenCounts] = {}
        self._late: dict[int, Ints] = {}
        self._bad_words: dict[int, BadWords] = {}
        self._allowed: dict[int, Words] = {}  # masks of the rows that may draw only tokens that they name
        self._limited = np.zeros(max_num_seqs, bool)
        self._biased = np.zeros(max_num_seqs, bool)
        self._penalised = np.zeros(max_num_seqs, bool)
        self._has_bad_words = np.zeros(max_num_seqs, bool)
        self._min_tokens = np.zeros(max_num_seqs, np.int64)

    def start(self, start: RowStart) -> None:
        """Replace a row's parameters and token counts."""
        row, params = start.row, start.params
        size = start.vocab_size or self._vocab_size
        # An id beyond the vocabulary cannot be drawn. A draft model is started with ids that only an adapter of the
        # model has for which it drafts.
        biases = [(token, bias) for token, bias in params.logit_bias if token < size]
        bad_words = [word for word in params.bad_words if max(word) < size]
        for held in (self._biases, self._counts, self._late, self._bad_words, self._allowed):
            held.pop(row, None)
        self._limited[row] = bool(params.allowed_token_ids)
        self._biased[row] = bool(biases)
        self._penalised[row] = params.needs_counts
        self._has_bad_words[row] = bool(bad_words)
        self._min_tokens[row] = params.min_tokens
        if params.allowed_token_ids:
            self._allowed[row] = _mask([token for token in params.allowed_token_ids if token < size], size)
        if biases:
            self._biases[row] = _summed(biases)
        if params.needs_counts:
            prompt, generated = start.tokens[: start.num_prompt], start.tokens[start.num_prompt :]
            self._counts[row] = TokenCounts(prompt, generated, params)
        if bad_words:
            self._bad_words[row] = BadWords(bad_words, start.tokens[start.num_prompt :])
        if params.min_tokens:
            self._late[row] = np.array([id_ for id_ in set(start.late_ids) if id_ < size], np.int64)

    def concern(self, rows: Ints, num_generated: Ints) -> bool:
        """Return whether any of these rows has an edit, given their numbers of generated tokens."""
        banned = self._has_bad_words[rows] | (self._min_tokens[rows] > num_generated)
        return bool((self._limited[rows] | self._biased[rows] | self._penalised[rows] | banned).any())

    def apply(self, logits: Tensor, positions: SamplingPositions) -> None:
        """Edit ``logits`` [S, V] of the positions in place."""
        if (masks := self.allowed_masks(positions, logits.shape[1])) is not None:
            mask_logits(logits, *(to_device(each, logits.device) for each in masks))
        if has_kernel(logits):
            edit_logits(logits, to_device(self.packed(positions), logits.device))
            return
        self._add_biases(logits, positions.row)
        self._penalise(logits, positions)
        for index, tokens in self._bans(positions):
            logits[index, to_device(tokens, logits.device)] = -torch.inf

    def allowed_masks(self, positions: SamplingPositions, width: int) -> tuple[Ints, Words] | None:
        """Return token masks of the positions whose rows have ``allowed_token_ids``; None if there is no such position.

        Returns:
            The indices of these G positions, [G] int64, and their masks, [G, ceil(width / 32)] int32 as in
            ``DeviceMasks``.
        """
        lines = np.flatnonzero(self._limited[positions.row])
        if not len(lines):
            return None
        words = np.zeros((len(lines), -(-width // 32)), np.int32)
        for mask, row in zip(words, positions.row[lines].tolist(), strict=True):
            allowed = self._allowed[row][: len(mask)]
            mask[: len(allowed)] = allowed
        return lines, words

    def packed(self, positions: SamplingPositions) -> Edits:
        """Return the edits of the positions but ``allowed_masks``."""
        rows = positions.row
        biases: list[Part] = [
            (index, *self._biases[int(rows[index])], None) for index in np.flatnonzero(self._biased[rows]).tolist()
        ]
        penalties: list[Part] = [
            (index, *self._counts[int(rows[index])].penalties(positions.drafts[index]))
            for index in np.flatnonzero(self._penalised[rows]).tolist()
        ]
        bans: list[Part] = [(index, tokens, None, None) for index, tokens in self._bans(positions)]
        return pack_edits(biases, penalties, bans)

    def count(self, row: int, tokens: Sequence[int]) -> None:
        """Count the tokens just generated by a row, if it has penalties or bad words."""
        if self._penalised[row]:
            for token in tokens:
                self._counts[row].add(token)
        if self._has_bad_words[row]:
            self._bad_words[row].add(tokens)

    def _add_biases(self, logits: Tensor, rows: Ints) -> None:
        biased = np.flatnonzero(self._biased[rows])
        if not len(biased):
            return
        biases = [self._biases[row] for row in rows[biased].tolist()]
        index = _logit_index(biased, [tokens for tokens, _ in biases], logits.device)
        logits[index] += _join([bias for _, bias in biases], logits.device)

    def _penalise(self, logits: Tensor, positions: SamplingPositions) -> None:
        """logit / r if positive, logit * r if not, minus frequency * count, minus presence if it was generated."""
        penalised = np.flatnonzero(self._penalised[positions.row])
        if not len(penalised):
            return
        penalties = [self._counts[int(positions.row[i])].penalties(positions.drafts[i]) for i in penalised.tolist()]
        index = _logit_index(penalised, [tokens for tokens, _, _ in penalties], logits.device)
        repetition = _join([factor for _, factor, _ in penalties], logits.device)
        values = logits[index]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[index] = values - _join([subtract for _, _, subtract in penalties], logits.device)

    def _bans(self, positions: SamplingPositions) -> list[tuple[int, Ints]]:
        """Return the positions at which tokens are banned, and these tokens, each once."""
        rows = positions.row
        early = self._min_tokens[rows] > positions.num_generated
        has_bad_words = self._has_bad_words[rows]
        found = []
        for index in np.flatnonzero(early | has_bad_words).tolist():
            row = int(rows[index])
            tokens = self._late[row] if early[index] else np.zeros(0, np.int64)
            if has_bad_words[index]:
                tokens = np.union1d(tokens, self._bad_words[row].banned(positions.drafts[index]))
            if len(tokens):
                found.append((index, tokens))
        return found


def _mask(tokens: Sequence[int], vocab_size: int) -> Words:
    """Return the mask of these tokens, [ceil(vocab_size / 32)] int32."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.asarray(tokens, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _summed(biases: Sequence[tuple[int, float]]) -> tuple[Ints, Floats]:
    """Return distinct tokens and the sum of the biases of each."""
    tokens, index = np.unique([token for token, _ in biases], return_inverse=True)
    sums = np.bincount(index, weights=[bias for _, bias in biases])
    return tokens.astype(np.int64), sums.astype(np.float32)


def _logit_index(positions: Ints, tokens: list[Ints], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the index of all logits (positions[j], t) with t in tokens[j]."""
    repeated = np.repeat(positions, [len(each) for each in tokens])
    return to_device(repeated, device), _join(tokens, device)


def _join(arrays: Iterable[npt.NDArray[np.generic]], device: torch.device) -> Tensor:
    return to_device(np.concatenate(list(arrays)), device)
