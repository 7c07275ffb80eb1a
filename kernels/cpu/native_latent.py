"""The native ops of latent attention on tensors: rotary embedding and store, and the choice of tokens."""

from __future__ import annotations

from struct import Struct
from typing import Final

import torch
from torch import Tensor

from ..layouts.attention_arguments import LatentParams, PagedBatch
from .native_library import Fields, NativeLibrary

_STORE: Final = Struct("18qd")
_CHOOSE: Final = Struct("17q")
_BLOCK_SCORES: Final = Struct("17q")
_NO_MEMORY: Final = 2  # return code of a C function whose allocation failed


class LatentKernels:
    """The ops of a compiled library, for contiguous tensors of one supported type. Indices are checked."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._store = library.bind("rope_store_latent", _STORE, Fields((7,)))
        self._choose = library.bind("choose_tokens", _CHOOSE)
        self._block_scores = library.bind("block_scores", _BLOCK_SCORES)

    def rope_store(
        self, q: Tensor, kv: Tensor, positions: Tensor, kv_loc: Tensor, cache: Tensor, params: LatentParams
    ) -> None:
        """See ``kernels.latent_ops.rope_store_latent``."""
        num_pages, _, page_size, width = cache.shape
        table, rotary_dim = params.cos_sin, params.rotary_dim
        longest = params.query_scale if table is None else table
        params.check(q, kv, cache)
        for name, index in (("positions", positions), ("kv_loc", kv_loc)):
            if index.dtype is not torch.int64 or index.shape != q.shape[:1] or not index.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous int64 [{q.shape[0]}], not {index.dtype} {list(index.shape)}"
                )
        failed = self._store(
            _STORE.pack(
                q.data_ptr(),
                kv.data_ptr(),
                positions.data_ptr(),
                0 if table is None else table.data_ptr(),
                kv_loc.data_ptr(),
                cache.data_ptr(),
                params.norm.data_ptr(),
                q.shape[0],
                params.num_heads,
                params.plain_dim,
                width - rotary_dim,
                rotary_dim,
                0 if longest is None else len(longest),
                num_pages * page_size,
                params.is_interleaved,
                q.dtype is torch.bfloat16,
                self._library.num_threads,
                0 if params.query_scale is None else params.query_scale.data_ptr(),
                params.eps,
            )
        )
        if failed:
            raise IndexError(f"a position or a cell is out of range: the cache has {num_pages * page_size} cells")

    def choose_tokens(self, q: Tensor, weights: Tensor, cache: Tensor, batch: PagedBatch, most: int) -> Tensor:
        """See ``kernels.index_ops.choose_tokens``."""
        tokens, heads, dim = q.shape
        num_pages, _, page_size, width = cache.shape
        rows, table_width = batch.page_table.shape
        if weights.shape != (tokens, heads) or width != dim or most < 1:
            raise ValueError(f"q {list(q.shape)}, weights {list(weights.shape)}, keys {list(cache.shape)} do not fit")
        _check_rows(batch)
        chosen = torch.empty((tokens, most + 1), dtype=torch.int32)
        failed = self._choose(
            _CHOOSE.pack(
                q.data_ptr(),
                weights.data_ptr(),
                cache.data_ptr(),
                batch.page_table.data_ptr(),
                batch.query_start.data_ptr(),
                batch.context_len.data_ptr(),
                chosen.data_ptr(),
                tokens,
                rows,
                table_width,
                num_pages,
                page_size,
                heads,
                dim,
                most,
                q.dtype is torch.bfloat16,
                self._library.num_threads,
            )
        )
        if failed == _NO_MEMORY:
            raise MemoryError("the choice of tokens could not allocate its scores")
        if failed:
            raise IndexError(f"the page table or the lengths lead outside {num_pages} pages or {tokens} tokens")
        return chosen

    def block_scores(self, q: Tensor, cache: Tensor, batch: PagedBatch, size: int, blocks: int) -> Tensor:
        """Return the best score of the tokens of each block, [T, H, blocks] fp32; see ``block_index_ops``."""
        tokens, heads, dim = q.shape
        num_pages, _, page_size, width = cache.shape
        rows, table_width = batch.page_table.shape
        if width != dim or size < 1:
            raise ValueError(f"q {list(q.shape)} and keys {list(cache.shape)} do not fit")
        _check_rows(batch)
        found = torch.empty((tokens, heads, blocks), dtype=torch.float32)
        failed = self._block_scores(
            _BLOCK_SCORES.pack(
                q.data_ptr(),
                cache.data_ptr(),
                batch.page_table.data_ptr(),
                batch.query_start.data_ptr(),
                batch.context_len.data_ptr(),
                found.data_ptr(),
                tokens,
                rows,
                table_width,
                num_pages,
                page_size,
                heads,
                dim,
                blocks,
                size,
                q.dtype is torch.bfloat16,
                self._library.num_threads,
            )
        )
        if failed == _NO_MEMORY:
            raise MemoryError("the scores of blocks could not be allocated")
        if failed:
            raise IndexError(f"the page table or the lengths lead outside {num_pages} pages or {tokens} tokens")
        return found


def _check_rows(batch: PagedBatch) -> None:
    """Raise ValueError for indices of another type or shape."""
    rows, table_width = batch.page_table.shape
    for name, index, shape in (
        ("page_table", batch.page_table, (rows, table_width)),
        ("query_start", batch.query_start, (rows + 1,)),
        ("context_len", batch.context_len, (rows,)),
    ):
        if index.dtype is not torch.int32 or index.shape != shape or not index.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32 {shape}, not {index.dtype} {list(index.shape)}")
