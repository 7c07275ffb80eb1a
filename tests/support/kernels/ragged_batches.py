"""Random ragged batches over paged caches, shared by the tests of this room.

Every cell that no row may read holds NaN, so that a read too far shows in the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from rootgraft.kernels import ops, reference
from rootgraft.kernels.layouts import int8_kv_layout, kv_forms

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def instruction_sets(light: str, *heavy: str) -> pytest.MarkDecorator:
    """A test for each of these levels of CPUs, as ``arch``: what ``cpu_levels.load_level`` takes."""
    marked = (pytest.param(arch, marks=pytest.mark.heavy) for arch in heavy)
    return pytest.mark.parametrize("arch", [light, *marked])


@st.composite
def row_shapes(draw: st.DrawFn) -> tuple[int, int]:
    """Query tokens and context of a row."""
    context = draw(st.one_of(st.integers(1, 80), st.integers(200, 600)))
    return draw(st.integers(1, min(context, 70))), context


@dataclass(frozen=True)
class RaggedBatch:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    query_start: Tensor
    context_len: Tensor
    shared: ops.SharedPrefixes | None = None

    @property
    def args(self) -> tuple:
        """The arguments of ``ops.attention`` but for the layer's."""
        most = int(self.query_start.diff().max()), int(self.context_len.max())
        batch = ops.PagedBatch(self.page_table, self.query_start, self.context_len, *most, self.shared)
        return self.q, self.k_cache, self.v_cache, batch

    def expected(self, **options: object) -> Tensor:
        return reference.attention(*self.args, ops.AttentionParams(**options))

    def in_int8(self) -> RaggedBatch:
        """The same with caches of 8 bits, whose unwritten cells have no number for a scale."""
        num_pages, kv_heads, page_size, head_dim = self.k_cache.shape
        shape = (num_pages, kv_heads, page_size, head_dim + int8_kv_layout.SCALE_BYTES)
        k_cache, v_cache = (
            torch.empty(shape, dtype=int8_kv_layout.DTYPE),
            torch.empty(shape, dtype=int8_kv_layout.DTYPE),
        )
        page, cell = torch.meshgrid(torch.arange(num_pages), torch.arange(page_size), indexing="ij")
        for store, cache, cells in (
            (int8_kv_layout.store_keys, k_cache, self.k_cache),
            (int8_kv_layout.store_values, v_cache, self.v_cache),
        ):
            store(cache, page.flatten(), cell.flatten(), cells.transpose(1, 2).flatten(0, 1))
        return replace(self, k_cache=k_cache, v_cache=v_cache)

    def in_rows(self, dtype: torch.dtype) -> RaggedBatch:
        """The same with caches in rows of 8 bits, integers or E4M3."""
        num_pages, kv_heads, page_size, head_dim = self.k_cache.shape
        shape = (num_pages, kv_heads, page_size, head_dim + int8_kv_layout.SCALE_BYTES)
        caches = [torch.zeros(shape, dtype=torch.uint8).view(dtype) for _ in range(2)]
        page, cell = torch.meshgrid(torch.arange(num_pages), torch.arange(page_size), indexing="ij")
        cells = (each.transpose(1, 2).flatten(0, 1) for each in (self.k_cache, self.v_cache))
        kv_forms.store(*caches, page.flatten(), cell.flatten(), *cells)
        return replace(self, k_cache=caches[0], v_cache=caches[1])

    def pick(self, row: int, first: int, end: int) -> RaggedBatch:
        """One row alone, cut to its query tokens [first, end), with the context that they have."""
        start, stop = int(self.query_start[row]), int(self.query_start[row + 1])
        context = int(self.context_len[row]) - (stop - start - end)
        return RaggedBatch(
            self.q[start + first : start + end].clone(),
            self.k_cache,
            self.v_cache,
            self.page_table[row : row + 1].clone(),
            torch.tensor([0, end - first], dtype=torch.int32),
            torch.tensor([context], dtype=torch.int32),
        )


def ragged_batch(
    rows: list[tuple[int, int]],
    *,
    heads: int = 9,
    kv_heads: int = 3,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> RaggedBatch:
    """A batch of rows (query tokens, context), with pages in random order."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-context // page_size) for _, context in rows]
    order = (torch.randperm(sum(pages), generator=generator) + 1).to(torch.int32)
    cache = torch.full((2, sum(pages) + 2, kv_heads, page_size, head_dim), float("nan"), dtype=dtype)
    table = torch.zeros(len(rows), max(pages), dtype=torch.int32)
    taken = 0
    for row, ((_, context), count) in enumerate(zip(rows, pages, strict=True)):
        table[row, :count] = order[taken : taken + count]
        for i, page in enumerate(order[taken : taken + count].tolist()):
            cells = min(page_size, context - i * page_size)
            values = torch.randn(2, kv_heads, cells, head_dim, generator=generator)
            cache[:, page, :, :cells] = values.to(dtype)
        taken += count
    starts = torch.tensor([0] + [query for query, _ in rows]).cumsum(0).to(torch.int32)
    return RaggedBatch(
        q=torch.randn(int(starts[-1]), heads, head_dim, generator=generator).to(dtype),
        k_cache=cache[0].clone(),
        v_cache=cache[1].clone(),
        page_table=table,
        query_start=starts,
        context_len=torch.tensor([context for _, context in rows], dtype=torch.int32),
    )


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Equal within what one rounding of the type, and of the softmax weights, can do."""
    assert actual.dtype is expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


def assert_same_bits_as_alone(batch: RaggedBatch, **options: object) -> None:
    """Each row gets what it would get without the others. Options are those of ``ops.AttentionParams``."""
    params = ops.AttentionParams(**options)
    together = ops.attention(*batch.args, params)
    for row in range(len(batch.context_len)):
        start, stop = batch.query_start[row : row + 2].tolist()
        alone = ops.attention(*batch.pick(row, 0, stop - start).args, params)
        assert torch.equal(alone, together[start:stop])
