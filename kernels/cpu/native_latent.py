"""The native op that rotates queries and stores the keys of latent attention, on tensors."""

from __future__ import annotations

from struct import Struct
from typing import Final

import torch
from torch import Tensor

from ..layouts.attention_arguments import LatentParams
from .native_library import Fields, NativeLibrary

_STORE: Final = Struct("17qd")


class LatentKernels:
    """The op of a compiled library, for contiguous tensors of one type that has kernels; indices are checked."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._store = library.bind("rope_store_latent", _STORE, Fields((7,)))

    def rope_store(
        self, q: Tensor, kv: Tensor, positions: Tensor, kv_loc: Tensor, cache: Tensor, params: LatentParams
    ) -> None:
        """See ``kernels.latent_ops.rope_store_latent``."""
        num_pages, _, page_size, width = cache.shape
        table, rotary_dim = params.cos_sin, params.rotary_dim
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
                0 if table is None else len(table),
                num_pages * page_size,
                params.is_interleaved,
                q.dtype is torch.bfloat16,
                self._library.num_threads,
                params.eps,
            )
        )
        if failed:
            raise IndexError(f"a position or a cell is out of range: the cache has {num_pages * page_size} cells")
