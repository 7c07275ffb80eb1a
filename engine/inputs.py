"""From the plan of a step to the tensors of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, Row


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """Tensors of one forward over a ragged batch of R rows and T tokens, on the model's device.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, the position of each token in its sequence.
        kv_loc: [T] int64, where its K and V go: ``page * page_size + position % page_size``.
        page_table: [R, P] int32, the pages of each row; entries past a row's last page are 0.
        query_start: [R + 1] int32, row r owns tokens ``query_start[r]:query_start[r + 1]``.
        context_len: [R] int32, tokens with KV after this step: start + len(tokens).
        max_query: the longest row's number of tokens.
        max_context: the largest of ``context_len``.
    """

    token_ids: Tensor
    positions: Tensor
    kv_loc: Tensor
    page_table: Tensor
    query_start: Tensor
    context_len: Tensor
    max_query: int
    max_context: int


class InputBuilder:
    """Keeps the page table between steps, so that a step carries only what is new in it.

    Args:
        max_num_seqs: rows of the page table.
        max_model_len: tokens of the longest sequence, in positions.
        page_size: tokens in a page.
        device: where the tensors go.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        self._pages = np.zeros((max_num_seqs, -(-max_model_len // page_size)), dtype=np.int32)

    def build(self, batch: Batch) -> ForwardInputs:
        """The tensors of a step; enters the batch's new pages in the page table."""
        rows = batch.rows
        for row in rows:
            if row.new_pages:
                end = row.first_new_page + len(row.new_pages)
                self._pages[row.row, row.first_new_page : end] = row.new_pages
        lengths = np.fromiter((len(row.tokens) for row in rows), np.int32, len(rows))
        starts = np.fromiter((row.start for row in rows), np.int32, len(rows))
        line = np.fromiter((row.row for row in rows), np.int64, len(rows))
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        context = starts + lengths
        # Position of a token = start of its row + how far it stands behind its row's first token.
        positions = np.arange(query_start[-1], dtype=np.int64) + np.repeat(starts - query_start[:-1], lengths)
        page, cell = np.divmod(positions, self._page_size)
        kv_loc = self._pages[np.repeat(line, lengths), page].astype(np.int64) * self._page_size + cell
        max_context = int(context.max())
        return ForwardInputs(
            token_ids=self._to_device(_token_ids(rows)),
            positions=self._to_device(positions),
            kv_loc=self._to_device(kv_loc),
            page_table=self._to_device(self._pages[line, : -(-max_context // self._page_size)]),
            query_start=self._to_device(query_start),
            context_len=self._to_device(context),
            max_query=int(lengths.max()),
            max_context=max_context,
        )

    def _to_device(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device, non_blocking=True)


def _token_ids(rows: Sequence[Row]) -> NDArray[np.int64]:
    """[T] int64 from each row's tokens, which are int arrays or lists."""
    return np.concatenate([np.asarray(row.tokens, dtype=np.int64) for row in rows])
