"""``HeadInputs``: the hidden states that a draft head reads beside the tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from ..batch import Batch
from ..models.draft_head import HeadStates
from ..models.hidden_pool import HiddenPool


class HeadInputs:
    """Gives a draft head hidden states: of known tokens those of the model, behind a draft its own.

    Args:
        states: of the head.
        hidden: those of the model.
        num_rows: of the head's page table.
        page_size: tokens in a page.
    """

    def __init__(self, states: HeadStates, hidden: HiddenPool, num_rows: int, page_size: int) -> None:
        self._states, self._hidden, self._page_size = states, hidden, page_size
        # Hidden states behind the last token of each row.
        self._last = hidden.cells.new_empty((num_rows, hidden.cells.shape[1]))

    @torch.inference_mode()
    def give(self, batch: Batch, pages: Seq[Seq[int]]) -> None:
        """Put the hidden states of a step's tokens together: see ``DraftRunner.run``."""
        given = [
            self._hidden.cells[self._cells(row.start, len(row.tokens), held)] if held else self._last[row.row, None]
            for row, held in zip(batch.rows, pages, strict=True)
        ]
        self._states.given = torch.cat(given)

    @torch.inference_mode()
    def keep(self, batch: Batch) -> None:
        """Keep what the head left at the last token of each row that drew, for the next step."""
        if rows := [row.row for row in batch.rows if row.draws]:
            self._last[rows] = self._states.left

    def _cells(self, start: int, count: int, pages: Seq[int]) -> NDArray[np.int64]:
        page, cell = np.divmod(np.arange(start, start + count), self._page_size)
        return np.asarray(pages, np.int64)[page] * self._page_size + cell
