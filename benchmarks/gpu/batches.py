"""Batches over paged K and V for the parts that call attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.measure import Machine
from rootgraft.kernels import ops
from rootgraft.kernels.layouts.attention_arguments import LongRow


@dataclass(frozen=True)
class Batch:
    """Arguments of ``kernels.ops.attention``, and the same K and V without pages.

    Attributes:
        rows: (new tokens, context) of each row.
        shared_pages: leading pages that all rows have in common.
    """

    rows: list[tuple[int, int]]
    shared_pages: int
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    query_start: Tensor
    context_len: Tensor
    shared: ops.SharedPrefixes | None

    def attend(self, scale: float, *, sharing: bool = True, gathering: bool = False, **options: Any) -> Tensor:
        """``ops.attention``, with ``gathering`` of all rows over gathered pages."""
        batch = ops.PagedBatch(
            self.page_table,
            self.query_start,
            self.context_len,
            max(query for query, _ in self.rows),
            max(context for _, context in self.rows),
            self.shared if sharing else None,
            self._long_rows() if gathering else None,
        )
        return ops.attention(self.q, self.k_cache, self.v_cache, batch, ops.AttentionParams(scale, **options))

    def _long_rows(self) -> ops.LongRows:
        ends = np.cumsum([query for query, _ in self.rows]).tolist()
        return ops.LongRows(
            tuple(
                LongRow(row, end - query, end, context)
                for row, ((query, context), end) in enumerate(zip(self.rows, ends, strict=True))
            )
        )

    def dense(self, cache: Tensor, row: int) -> Tensor:
        """K or V of a row: [Hkv, context, D]."""
        context = self.rows[row][1]
        pages = cache[self.page_table[row].long()]
        return pages.transpose(0, 1).flatten(1, 2)[:, :context]

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that must be read once."""
        page_size = self.k_cache.shape[2]
        private = sum(context - self.shared_pages * page_size for _, context in self.rows)
        tokens = private + self.shared_pages * page_size
        return 2 * tokens * self.k_cache.shape[1] * self.k_cache.shape[3] * self.k_cache.element_size()

    @property
    def pairs(self) -> int:
        """Query tokens times the keys that each sees."""
        return sum(query * context - query * (query - 1) // 2 for query, context in self.rows)


def make_batch(
    machine: Machine,
    rows: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int = 16,
    shared_pages: int = 0,
    dtype: torch.dtype | None = None,
) -> Batch:
    """A batch of rows (new tokens, context), with pages in random order."""
    dtype = dtype or machine.dtype
    counts = [-(-context // page_size) - shared_pages for _, context in rows]
    order = torch.randperm(shared_pages + sum(counts)).int().tolist()
    table = np.zeros((len(rows), shared_pages + max(counts)), np.int32)
    table[:, :shared_pages] = order[:shared_pages]
    taken = shared_pages
    for line, count in zip(table, counts, strict=True):
        line[shared_pages : shared_pages + count] = order[taken : taken + count]
        taken += count
    cache = (len(order), kv_heads, page_size, dim)
    lengths = np.array([query for query, _ in rows], np.int32)
    contexts = np.array([context for _, context in rows], np.int32)
    shared = ops.find_shared_prefixes(table, lengths, contexts, page_size, machine.device)
    return Batch(
        rows=rows,
        shared_pages=shared_pages,
        q=machine.randn(int(lengths.sum()), heads, dim, dtype=dtype),
        k_cache=machine.randn(*cache, dtype=dtype),
        v_cache=machine.randn(*cache, dtype=dtype),
        page_table=torch.from_numpy(table).to(machine.device),
        query_start=machine.ints([0, *lengths.cumsum().tolist()]),
        context_len=torch.from_numpy(contexts).to(machine.device),
        shared=shared and shared.to(machine.device),
    )
