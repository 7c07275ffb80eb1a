"""CUDA graphs of the head and the draw: one launch in place of a dozen, without a decision of the host.

A graph has a fixed number of lines, one for each sampling position. A step replays the smallest graph with enough
lines; lines that are not needed have no row. The sampling parameters of rows (greedy, temperature, top-k, top-p, min-p,
top-n-sigma, seeds) are in a table on the device, so one graph serves any combination of them. There are separate graphs
for steps with masks, penalties, logit bias or bans, and for steps with logprobs, which are then computed for all lines.
Three kinds of steps are drawn op by op: with logprobs of named tokens, with logprobs of all tokens that a mask allows,
and with adapters that change the head.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.layouts.logit_edits import MOST_EDITS, Edits, pack_edits
from ...kernels.layouts.staging import HostCopy, refill
from ...kernels.ops import largest
from ...kernels.pass_graphs import Capture
from ...kernels.sampling_ops import draw_lines, edit_logits, mask_logits
from ..config import EngineConfig
from ..models.model import Model
from ..sampling.draft_verify import SamplingPositions
from ..sampling.logprobs import logprob_columns
from ..sampling.sampler import Drawing, Sampler, scored_tokens
from ..types import MAX_LOGPROBS
from .cuda_graphs import sizes_up_to

Longs = NDArray[np.int64]


class DrawVariant(NamedTuple):
    """The draws that a graph serves."""

    num_lines: int
    is_edited: bool  # whether masks or a list of single logits change the logits
    has_logprobs: bool = False


class LineMasks(NamedTuple):
    """Token masks of some lines: their numbers, [G] int64, and [G, ceil(V / 32)] int32 as in ``DeviceMasks``."""

    lines: Longs
    words: NDArray[np.int32]


def joined_masks(masks: LineMasks | None, more: tuple[Longs, NDArray[np.int32]] | None) -> LineMasks | None:
    """Join masks from two sources to one for each line; a line with two masks allows the tokens that both allow."""
    if masks is None or more is None:
        return masks if more is None else LineMasks(*more)
    lines, index = np.unique(np.concatenate([masks.lines, more[0]]), return_inverse=True)
    words = np.full((len(lines), masks.words.shape[1]), -1, np.int32)
    np.bitwise_and.at(words, index, np.concatenate([masks.words, more[1]]))
    return LineMasks(lines, words)


class LineEdits(NamedTuple):
    """Changes of the logits before a draw: masks of lines, and edits of single logits; None if absent."""

    masks: LineMasks | None = None
    edits: Edits | None = None

    def __bool__(self) -> bool:
        return self.masks is not None or self.edits is not None


class DrawGraphs:
    """Draws a token of each sampling position by replaying a graph.

    Args:
        model: the model whose head is computed.
        table: parameters and seeds of rows on the device, ``DrawTable.rows``.
        capture: runs a pass and returns its replay. The passes may share memory with the model's forward passes,
            because a draw runs between two of them.
        max_lines: largest number of sampling positions of a step.
        width: V, the number of logits.
    """

    def __init__(self, model: Model, table: Tensor, capture: Capture, max_lines: int, width: int) -> None:
        self._model, self._table, self._capture, self.width = model, table, capture, width
        self._sizes = sizes_up_to(max_lines)
        most, device = self._sizes[-1], model.device
        self._hidden = torch.zeros((most, model.config.hidden_size), dtype=model.dtype, device=device)
        # Each size has, for each line, its row and position, the token of its hidden state, and the line of its mask.
        self._numbers = torch.zeros(4 * (most + 1), dtype=torch.int64, device=device)
        self._words = torch.zeros((most, -(-self.width // 32)), dtype=torch.int32, device=device)
        self._edits = torch.ones((1 + MOST_EDITS, 4), dtype=torch.int32, device=device)  # an empty list of edits
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._scored = torch.zeros((most, 3 + 2 * self._num_top), dtype=torch.float64, device=device)
        self._replays: dict[DrawVariant, Callable[[], None]] = {}

    @property
    def _num_top(self) -> int:
        """Top logprobs that are computed of each line."""
        return min(MAX_LOGPROBS, self.width)

    @property
    def variants(self) -> list[DrawVariant]:
        """All variants, the largest first."""
        return [DrawVariant(size, *kind) for size in reversed(self._sizes) for kind in product((True, False), repeat=2)]

    @torch.inference_mode()
    def capture(self, variants: Sequence[DrawVariant]) -> None:
        """Run and capture a draw for each of these variants."""
        for variant in variants:
            self._fill(variant.num_lines, np.zeros(0, np.int64), np.zeros((0, 2), np.int64), np.zeros(0, np.int64))
            self._replays[variant] = self._capture(self._pass(variant))

    def holds(self, num_lines: int, edits: LineEdits, *, has_logprobs: bool = False) -> bool:
        """Return whether there is a graph for ``num_lines`` sampling positions with these edits and logprobs."""
        fits = edits.edits is None or len(edits.edits) <= len(self._edits)
        return fits and num_lines <= self._sizes[-1] and self._variant(num_lines, edits, has_logprobs) in self._replays

    def draw(
        self,
        hidden: Tensor,
        index: Longs,
        positions: SamplingPositions,
        edits: LineEdits,
        num_logprobs: Sequence[int] = (),
    ) -> Drawing:
        """Begin to draw a token at each position. The next draw overwrites the results on the device.

        Args:
            hidden: [T, H], hidden states; they may be overwritten after this call.
            index: [S], the index in ``hidden`` of each position. ``holds`` must be true for S, the edits and the
                logprobs.
            edits: masks and edits of the logits.
            num_logprobs: [S], as from ``Sampler.num_logprobs``.
        """
        count, masks = len(index), edits.masks
        variant = self._variant(count, edits, bool(num_logprobs))
        lines = np.stack([positions.row, positions.num_generated], 1)
        self._fill(variant.num_lines, index, lines, np.zeros(0, np.int64) if masks is None else masks.lines)
        if masks is not None:
            refill(self._words[: len(masks.words)], masks.words)
        if variant.is_edited:
            listed = pack_edits((), (), ()) if edits.edits is None else edits.edits
            refill(self._edits[: len(listed)], listed)
        _, tokens, _ = self._views(variant.num_lines)
        torch.index_select(hidden, 0, tokens, out=self._hidden[: variant.num_lines])
        self._replays[variant]()
        read = self._scored if variant.has_logprobs else self._tokens
        return Drawing(positions, self._tokens[:count], HostCopy(read[:count]), num_logprobs)

    def _variant(self, num_lines: int, edits: LineEdits, has_logprobs: bool) -> DrawVariant:
        return DrawVariant(self._sizes[bisect_left(self._sizes, num_lines)], bool(edits), has_logprobs)

    def _fill(self, size: int, index: Longs, lines: Longs, masked: Longs) -> None:
        """Copy a step's numbers to the device. Lines that pad it have no row, and masks that pad it no line."""
        span = _span(size)
        numbers = np.full(4 * span, -1, np.int64)
        numbers[: 2 * len(lines)] = lines.ravel()
        numbers[2 * span : 3 * span] = 0
        numbers[2 * span :][: len(index)] = index
        numbers[3 * span :][: len(masked)] = masked
        refill(self._numbers[: 4 * span], numbers)

    def _views(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return lines [size, 2], the tokens of hidden states [size], and the lines of masks [size] in the buffer."""
        span = _span(size)
        lines, tokens, masked = self._numbers[: 4 * span].split((2 * span, span, span))
        return lines[: 2 * size].view(size, 2), tokens[:size], masked[:size]

    def _pass(self, variant: DrawVariant) -> Callable[[], None]:
        """Return a draw over the static inputs."""
        size = variant.num_lines
        lines, _, masked = self._views(size)
        hidden, words, tokens = self._hidden[:size], self._words[:size], self._tokens[:size]
        scored, num_top = self._scored[:size], self._num_top

        def run() -> None:
            logits = self._model.logits(hidden)
            raw = logits.clone() if variant.is_edited and variant.has_logprobs else logits
            if not variant.is_edited:
                tokens.copy_(draw_lines(logits, self._table, lines))
            else:
                # An edit may hide a value that is not finite.
                before = largest(logits).value
                mask_logits(logits, masked, words)
                edit_logits(logits, self._edits)
                drawn = draw_lines(logits, self._table, lines)
                tokens.copy_(torch.where(before - before == 0, drawn, -1))
            if variant.has_logprobs:
                scored.copy_(scored_tokens(tokens, logprob_columns(raw, tokens.clamp(min=0), num_top)))

        return run


def _span(size: int) -> int:
    """An even number of integers, so that each part of the buffer begins at an address that kernels take."""
    return size + size % 2


def draws_for(config: EngineConfig, model: Model, sampler: Sampler, capture: Capture) -> DrawGraphs | None:
    """Return graphs of draws, none captured yet; None if the sampler does not draw by kernels of a GPU."""
    if sampler.table is None:
        return None
    return DrawGraphs(model, sampler.table, capture, config.most_seqs + config.max_drafts, sampler.vocab_size)
