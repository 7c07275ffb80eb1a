"""``HeadInputs``: the hidden states that a draft head reads in addition to the tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels.layouts.staging import to_device
from ..batch import Batch
from ..models.draft_head import HeadStates
from ..models.hidden_pool import HiddenPool

_NO_ROW = -1


class HeadInputs:
    """Gives a draft head hidden states: the model's for known tokens, the head's own for drafts.

    The states are gathered on the device, without waiting for it.

    Args:
        states: hidden states of the head, with room for the tokens of a step.
        hidden: hidden states of the model.
        num_rows: number of rows of the head's page table.
        page_size: tokens in a page.
    """

    def __init__(self, states: HeadStates, hidden: HiddenPool, num_rows: int, page_size: int) -> None:
        self._states, self._hidden, self._page_size = states, hidden, page_size
        # Hidden states at the last token of each row.
        self._last = hidden.cells.new_zeros((num_rows, hidden.cells.shape[1]))

    @torch.inference_mode()
    def give(self, batch: Batch, pages: Seq[Seq[int]]) -> None:
        """Put the hidden states of a step's tokens together: see ``DraftRunner.run``."""
        # The source of each token's hidden states: a cell of the pool, or the row whose last ones are kept.
        sources = np.full((2, batch.num_tokens), _NO_ROW, np.int64)
        begin = 0
        for row, held in zip(batch.rows, pages, strict=True):
            end = begin + len(row.tokens)
            if held:
                sources[0, begin:end] = self._cells(row.start, len(row.tokens), held)
            else:
                sources[1, begin:end] = row.row
            begin = end
        cells, rows = to_device(sources, self._last.device)
        given = self._states.given[: batch.num_tokens]
        if all(pages):
            torch.index_select(self._hidden.cells, 0, cells, out=given)
        else:
            torch.where((rows != _NO_ROW)[:, None], self._last[rows], self._hidden.cells[cells], out=given)

    @torch.inference_mode()
    def keep(self, batch: Batch) -> None:
        """Keep the head's hidden state at the last token of each row that drew, for the next step."""
        ends = accumulate(len(row.tokens) for row in batch.rows)
        drawn = [(row.row, end - 1) for row, end in zip(batch.rows, ends, strict=True) if row.draws]
        if drawn:
            rows, tokens = to_device(np.array(drawn, np.int64).T, self._last.device)
            self._last.index_copy_(0, rows, self._states.left.index_select(0, tokens))

    def _cells(self, start: int, count: int, pages: Seq[int]) -> NDArray[np.int64]:
        page, cell = np.divmod(np.arange(start, start + count), self._page_size)
        return np.asarray(pages, np.int64)[page] * self._page_size + cell
