"""Launches of Triton attention over paged K and V: extend, decode with split context, shared prefixes.

  extend   rows of several new tokens: a tile of queries walks all keys that it sees, and writes its result.
  decode   rows of one new token: few query vectors, so reading keys dominates. Keys are split among programs (flash
           decoding), a row's by its share of all, so that one long row among short ones is not walked by a few. Partial
           results, normalised values and log2 of their weight, are merged by a second kernel.
  shared   keys of a prefix that several rows have in common (cascade attention), read once for the queries of all
           these rows: further partial results of each row.

Rows without tokens, which pad a captured batch, are skipped. Grids depend only on shapes and host numbers;
``max_context`` only bounds how finely decode splits, so a captured batch may give its upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..layouts import int8_kv_layout, kv_forms
from ..layouts.attention_arguments import AttentionParams, PagedBatch, SharedPrefixes
from . import attention_kernels
from .launch import NARROW_TYPES, Launch, cdiv, is_narrow, is_placed, meta, num_sms, power_of_two, shared_bytes

_BLOCKS_D = (64, 128, 256)  # dimensions of a head, rounded up
_MOST_LATENT, _MOST_REST = 512, 64  # dimensions of a latent key that are the value, and of the rest of it
_FEW_HEADS = 32  # most heads of latent attention for which decode has smaller tiles than extend
_NO_WINDOW = _NO_CHUNK = 1 << 30
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Config:
    """Tile shape of a kernel: query vectors and keys of a tile, warps, and stages of the pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Key: the kernel, the bytes of an element, and the dimensions of a head rounded up to a power of two.
CONFIGS = {
    ("decode", 2, 64): Config(16, 64, 4, 3),
    ("decode", 2, 128): Config(16, 64, 4, 3),
    ("decode", 2, 256): Config(16, 32, 4, 3),
    ("extend", 2, 64): Config(64, 64, 4, 3),
    ("extend", 2, 128): Config(128, 128, 8, 2),
    ("extend", 2, 256): Config(64, 32, 8, 2),
    ("shared", 2, 64): Config(64, 64, 4, 3),
    ("shared", 2, 128): Config(64, 64, 4, 3),
    ("shared", 2, 256): Config(64, 32, 8, 2),
    ("decode", 2, 512): Config(16, 32, 4, 3),
    ("decode_many", 2, 512): Config(64, 32, 8, 2),
    ("extend", 2, 512): Config(64, 32, 8, 2),
    ("shared", 2, 512): Config(64, 32, 8, 2),
    **{(kind, 4, dim): Config(16, 32, 4, 1) for kind in ("decode", "extend", "shared") for dim in (*_BLOCKS_D, 512)},
    ("decode_many", 4, 512): Config(16, 32, 4, 1),
}

# Sizes for KV in rows of 8 bits, which are widened in registers: they compile with few spills; not measured.
ROW_CONFIGS = {
    (kind, 2, dim): Config(64, 32 if dim == 256 else 64, 8, 2) for kind in ("extend", "shared") for dim in _BLOCKS_D
}

# Sizes for latent attention where a program may have less shared memory than on sm_80: 99 KiB on sm_86, 89 and 120.
# They compile without spills; not measured.
SMALL_CONFIGS = {(kind, 2, 512): Config(32, 32, 8, 2) for kind in ("decode_many", "extend", "shared")}
_LARGE_SHARED = 163 << 10

# Measured on an H200: more programs than are resident at once wait for the first ones to end.
_PROGRAMS_PER_SM = 4
_MOST_SPLITS = 64
_ROOM = 8  # programs that a grid has for each wanted one: those without keys end at once


def wanted_parts(programs: int, sms: int) -> int:
    """Return the parts to split the keys of all rows into, of which each takes ``programs`` programs."""
    return max(1, _PROGRAMS_PER_SM * sms // programs)


def most_splits(programs: int, max_context: int, sms: int) -> int:
    """Return the most parts of one row, where all rows take ``programs`` programs without a split."""
    room = cdiv(_ROOM * _PROGRAMS_PER_SM * sms, max(programs, 1))
    return max(1, min(room, cdiv(max_context, attention_kernels.LEAST_KEYS.value), _MOST_SPLITS))


def takes(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, value_dim: int | None = None) -> bool:
    """Return whether the kernels support this: heads of 16, 32 ... 256 dimensions, pages of a power of two.

    With ``value_dim`` latent keys of up to 512 dimensions that are values too, and 64 behind them.
    """
    page_size, dim = k_cache.shape[2], kv_forms.head_dim(k_cache)
    if value_dim is None:
        fits = dim % 16 == 0 and dim <= _BLOCKS_D[-1]
    else:
        rest = dim - value_dim
        fits = value_dim % 16 == rest % 16 == 0 and 0 < value_dim <= _MOST_LATENT and 0 < rest <= _MOST_REST
        fits = fits and not kv_forms.is_rows(k_cache)
    return (
        is_narrow(q)
        and is_placed(k_cache, v_cache)
        and page_table.is_contiguous()
        and (q.dtype is k_cache.dtype or kv_forms.is_rows(k_cache))
        and fits
        and page_size & (page_size - 1) == 0
    )


def as_read(cache: Tensor) -> Tensor:
    """Return a cache as kernels take it: rows of 8 bits as bytes."""
    return cache.view(torch.uint8) if kv_forms.is_rows(cache) else cache


def kv_form(cache: Tensor) -> int:
    """Return the constant by which kernels are compiled for the form of a cache."""
    forms = {kv_forms.INT8: attention_kernels.INT8_KV, kv_forms.FLOAT8: attention_kernels.FLOAT8_KV}
    return int(forms.get(cache.dtype, attention_kernels.PLAIN_KV).value)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    *,
    invariant: bool = False,
) -> Tensor:
    """``kernels.ops.attention``: q [T, Hq, D] -> [T, Hq * D], or [T, Hq * value_dim].

    The result is undefined for tokens of no row, which pad a captured batch.

    Args:
        invariant: the bits of a token depend on its own row alone, and not on which of its tokens are in the step:
            one kernel computes all rows, block by block from the row's first key on. Long rows are slower.
    """
    out = q.new_empty(*q.shape[:2], params.value_dim or q.shape[2])
    call = _Call(q, k_cache, v_cache, batch, params, out, invariant)
    for launch in call.launches():
        launch.run()
    return call.out.view(q.shape[0], -1)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of one call of ``attention``, and its launches."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: PagedBatch
    params: AttentionParams
    out: Tensor
    invariant: bool = False

    @property
    def kv_heads(self) -> int:
        return self.k_cache.shape[1]

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.q.shape[1] // self.kv_heads

    @property
    def rows(self) -> int:
        return self.batch.context_len.shape[0]

    @property
    def window(self) -> int:
        return self.params.window or _NO_WINDOW

    @property
    def chunk(self) -> int:
        return self.params.chunk or _NO_CHUNK

    @property
    def shared_prefixes(self) -> SharedPrefixes | None:
        """None with a window too: rows of one prefix then see it from different keys on."""
        return self.batch.shared if min(self.window, self.chunk) >= self.batch.max_context else None

    @property
    def sinks(self) -> Tensor:
        """The heads' sinks, or a placeholder."""
        return self.q if self.params.sinks is None else self.params.sinks

    @property
    def counts_sinks(self) -> Mapping[str, Any]:
        """Constant of the kernels that see each row's own keys."""
        return {"SINKS": self.params.sinks is not None}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The first arguments of each kernel that walks keys."""
        caches = map(as_read, (self.k_cache, self.v_cache))
        return self.q, *caches, self.batch.page_table, self.batch.query_start

    @property
    def cache_shape(self) -> tuple[int, int, int, int, int]:
        """Kernel arguments: heads of a group, KV heads, bits of an offset in a page, dimensions of a head, width of the
        page table."""
        page_size, dim = self.k_cache.shape[2], kv_forms.head_dim(self.k_cache)
        return self.group, self.kv_heads, page_size.bit_length() - 1, dim, self.batch.page_table.shape[1]

    @property
    def score(self) -> tuple[float, float]:
        """Kernel arguments: factor of q.k and bound of the score, for base 2."""
        scale, soft_cap = self.params.scale, self.params.soft_cap
        return (scale * _LOG2_E, 0.0) if soft_cap is None else (scale / soft_cap, soft_cap * _LOG2_E)

    @property
    def block_d(self) -> int:
        """Dimensions of a value, rounded up to a power of two."""
        return power_of_two(self.out.shape[2], _BLOCKS_D[0])

    def config(self, kind: str) -> Config:
        is_latent = self.params.value_dim is not None
        if kind == "decode" and is_latent and self.group > _FEW_HEADS:
            kind = "decode_many"
        key = kind, self.q.dtype.itemsize, _MOST_LATENT if is_latent else self.block_d
        if kv_forms.is_rows(self.k_cache) and key in ROW_CONFIGS:
            return ROW_CONFIGS[key]
        if key in SMALL_CONFIGS and shared_bytes(self.q.device) < _LARGE_SHARED:
            return SMALL_CONFIGS[key]
        return CONFIGS[key]

    def launches(self) -> Iterator[Launch]:
        """Yield the launches in order. Only the device knows which rows have one token: kernels skip the others."""
        if self.invariant:
            yield self.extend()
            return
        if self.batch.max_query > 1:
            yield self.extend()
        if self.batch.max_query == 1 or self.rows > 1:
            yield from self.decode()

    def extend(self) -> Launch:
        """Attention of rows with several tokens, or of all."""
        block_m = self.config("extend").block_m
        # Tiles of all rows, and room for an incomplete one of each.
        tiles = self.q.shape[0] * self.group // block_m + self.rows
        args = (
            *(*self.tensors, self.batch.context_len, self.sinks, self.out),
            *(self.rows, *self.cache_shape, self.window, self.chunk, *self.score),
        )
        more = {**self.counts_sinks, "EVERY": self.invariant}
        return self._walk(attention_kernels.extend, "extend", (tiles, self.kv_heads, 1), args, more)

    def decode(self) -> Iterator[Launch]:
        """Attention of rows with one token: shared prefixes, each row's own keys, and the merge of partial results."""
        shared = self.shared_prefixes
        heads, dim = self.out.shape[1:]
        row_tiles = cdiv(self.group, self.config("decode").block_m)
        keys = min(self.batch.max_context, self.window, self.chunk)
        programs, sms = row_tiles * self.kv_heads, num_sms(self.q.device)
        splits = most_splits(self.rows * programs, keys, sms)
        slots = splits + (shared.most_results if shared else 0)
        kept = self.rows * slots * heads if slots > 1 else 0
        values = self.q.new_empty(kept, dim, dtype=torch.float32)
        weight = self.q.new_empty(kept, dtype=torch.float32)
        parts = self.batch.context_len.new_empty(self.rows if slots > 1 else 0)
        if shared is not None:
            yield self.shared(shared, values, weight, splits, slots)
        args = (
            *(*self.tensors, self.batch.context_len, self.sinks, shared.end if shared else self.batch.context_len),
            *(self.out, values, weight, parts, self.rows, *self.cache_shape, self.window, self.chunk, *self.score),
            *(row_tiles, wanted_parts(programs, sms), splits, slots, int(shared is not None)),
        )
        grid = (self.rows * row_tiles, self.kv_heads, splits)
        yield self._walk(attention_kernels.decode, "decode", grid, args, self.counts_sinks)
        if slots > 1:
            yield self.merge(values, weight, parts, splits, slots)

    def shared(self, shared: SharedPrefixes, values: Tensor, weight: Tensor, splits: int, slots: int) -> Launch:
        """Partial results for the keys that rows of one token share."""
        tiles = cdiv(shared.most_members * self.group, self.config("shared").block_m)
        args = (
            *(*self.tensors, shared.items, shared.members),
            *(values, weight, *self.cache_shape, *self.score, splits, slots),
        )
        grid = (shared.items.shape[0], self.kv_heads, tiles)
        return self._walk(attention_kernels.shared, "shared", grid, args)

    def merge(self, values: Tensor, weight: Tensor, parts: Tensor, splits: int, slots: int) -> Launch:
        """Merge of the partial results of each row and head."""
        shared = self.shared_prefixes
        heads, dim = self.out.shape[1:]
        counts = shared.count if shared else self.batch.context_len
        numbers = (heads, dim, splits, slots, int(shared is not None))
        args = (values, weight, parts, self.batch.query_start, counts, self.out, *numbers)
        constants = {"BLOCK_D": self.block_d}
        return Launch(attention_kernels.merge, (self.rows, heads, 1), args, constants)

    def _walk(
        self,
        kernel: Any,
        kind: str,
        grid: tuple[int, int, int],
        args: tuple[Any, ...],
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> Launch:
        config = self.config(kind)
        value_dim = self.params.value_dim or 0
        constants = {
            **more,
            "BLOCK_D": self.block_d,
            "VALUES": value_dim,
            "BLOCK_R": power_of_two(self.q.shape[2] - value_dim, 16) if value_dim else 0,
            "KV": kv_form(self.k_cache),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "CAPPED": self.params.soft_cap is not None,
            "PRECISION": "ieee" if self.q.dtype is torch.float32 else "tf32",
        }
        return Launch(kernel, grid, args, constants, config.num_warps, config.num_stages)


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield every compilation of ``attention``: each kernel by type, head size, and with or without a cap.

    With sinks for the models that have them: heads of 64 dimensions, no cap. Of invariant attention, which takes
    another path through the same code, for heads of 128 dimensions.
    """
    for name, dtype in NARROW_TYPES.items():
        for dim in _BLOCKS_D:
            for soft_cap in (None, 50.0):
                call = _example(dtype, dim, soft_cap)
                end = "" if soft_cap is None else "-capped"
                launches = [call.extend(), *call.decode()]
                for kind, launch in zip(("extend", "shared", "decode", "merge"), launches, strict=True):
                    if kind != "merge" or soft_cap is None:  # a merge does not depend on the cap
                        yield f"attention_{kind}/{name}-{dim}{end}", launch
        call = _example(dtype, 128, None)
        yield f"attention_extend/{name}-128-invariant", replace(call, invariant=True).extend()
        call = _example(dtype, _BLOCKS_D[0], None, sinks=meta(16, dtype=torch.float32))
        _, decode, _ = call.decode()
        yield f"attention_extend/{name}-{_BLOCKS_D[0]}-sinks", call.extend()
        yield f"attention_decode/{name}-{_BLOCKS_D[0]}-sinks", decode
        yield from _latent_variants(name, dtype)
    yield from _row_variants()


def _row_variants() -> Iterator[tuple[str, Launch]]:
    """KV in rows of 8 bits, for the heads that most models have."""
    for kv, cache in {"int8": kv_forms.INT8, "fp8": kv_forms.FLOAT8}.items():
        call = _example(torch.bfloat16, 128, None, kv=cache)
        for kind, launch in zip(("extend", "shared", "decode"), (call.extend(), *call.decode()), strict=False):
            yield f"attention_{kind}/bf16-128-{kv}-kv", launch


def _latent_variants(name: str, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """DeepSeek's latent attention, with few heads and with many."""
    for heads in (16, 128):
        call = _example(dtype, _MOST_LATENT + _MOST_REST, None, value_dim=_MOST_LATENT, heads=heads)
        shared, decode, merge = call.decode()
        yield f"attention_decode/{name}-latent-{heads}", decode
        if heads <= _FEW_HEADS:
            yield f"attention_extend/{name}-latent", call.extend()
            yield f"attention_shared/{name}-latent", shared
            yield f"attention_merge/{name}-latent", merge


def _example(
    dtype: torch.dtype,
    dim: int,
    soft_cap: float | None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
    heads: int = 16,
    kv: torch.dtype | None = None,
) -> _Call:
    kv_heads = 4 if value_dim is None else 1
    width = dim if kv is None else dim + int8_kv_layout.SCALE_BYTES
    q, cache = meta(32, heads, dim, dtype=dtype), meta(8, kv_heads, 16, width, dtype=kv or dtype)
    shapes = ((3, 4), (32, 2), (16,), (16, 64), (17,))
    items, members, rows, table, starts = (meta(*shape, dtype=torch.int32) for shape in shapes)
    shared = SharedPrefixes(items, members, rows, rows, most_members=16, most_results=3)
    batch = PagedBatch(table, starts, rows, max_query=32, max_context=1 << 16, shared=shared)
    params = AttentionParams(dim**-0.5, soft_cap=soft_cap, sinks=sinks, value_dim=value_dim)
    return _Call(q, cache, cache, batch, params, meta(32, heads, value_dim or dim, dtype=dtype))
