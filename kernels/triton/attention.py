"""Attention over paged K and V: decode with a split context, extend, and prefixes that many rows share.

  extend   rows of several new tokens: a tile of queries walks all keys that it sees, and writes its result.
  decode   rows of one new token: few query vectors, so the keys are what costs. They are split among programs, whose
           partial results (normalised values and log2 of their weight) are merged by a second kernel.
  shared   keys that the lines of the page table have in common, read once for the queries of all these rows. These
           are further partial results of each row.

A row without tokens is skipped, as the rows are that pad a captured batch. Grids follow from shapes and numbers of the
host; ``max_context`` only decides how finely decode splits, so a captured batch may give the largest there can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import attention_kernels
from .launch import NARROW_TYPES, Launch, cdiv, is_known, meta, num_sms, power_of_two
from .shared_prefixes import SharedPrefixes

_BLOCKS_D = (64, 128, 256)  # dimensions of a head, rounded up
_NO_WINDOW = 1 << 30
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is cut: query vectors and keys of a tile, warps, and stages of the pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By the kernel, the bytes of an element, and the dimensions of a head rounded up to a power of two.
CONFIGS = {
    ("decode", 2, 64): Config(16, 64, 4, 3),
    ("decode", 2, 128): Config(16, 64, 4, 3),
    ("decode", 2, 256): Config(16, 32, 4, 3),
    ("extend", 2, 64): Config(128, 64, 8, 3),
    ("extend", 2, 128): Config(128, 64, 8, 3),
    ("extend", 2, 256): Config(64, 32, 8, 2),
    ("shared", 2, 64): Config(64, 64, 4, 3),
    ("shared", 2, 128): Config(64, 64, 4, 3),
    ("shared", 2, 256): Config(64, 32, 8, 2),
    **{(kind, 4, dim): Config(16, 32, 4, 1) for kind in ("decode", "extend", "shared") for dim in _BLOCKS_D},
}

# To be measured: programs wanted for each multiprocessor in decode, and the least keys that are worth a program.
_PROGRAMS_PER_SM = 4
_LEAST_KEYS = 128
_MOST_SPLITS = 64


def num_splits(programs: int, max_context: int, sms: int) -> int:
    """Parts that each row's context is cut into, so that ``programs`` of them become enough to fill the device."""
    wanted = cdiv(_PROGRAMS_PER_SM * sms, max(programs, 1))
    return max(1, min(wanted, cdiv(max_context, _LEAST_KEYS), _MOST_SPLITS))


def takes(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor) -> bool:
    """Whether the kernels compute this: heads of 16, 32 ... 256 dimensions, pages of a power of two."""
    page_size = k_cache.shape[2]
    return (
        is_known(q, k_cache, v_cache)
        and page_table.is_contiguous()
        and q.dtype is k_cache.dtype
        and q.shape[2] % 16 == 0
        and q.shape[2] <= _BLOCKS_D[-1]
        and page_size & (page_size - 1) == 0
    )


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    max_query: int,
    max_context: int,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    shared: SharedPrefixes | None = None,
) -> Tensor:
    """``kernels.ops.attention``: q [T, Hq, D] -> [T, Hq * D].

    Tokens of no row, which pad a captured batch, get no result: what is there is undefined.
    """
    out = torch.empty_like(q)
    if window is not None and window < max_context:
        shared = None  # Rows of one prefix see it from different keys on.
    call = _Call(q, k_cache, v_cache, page_table, query_start, context_len, window, scale, soft_cap, out)
    for launch in call.launches(max_query, max_context, shared):
        launch.run()
    return out.view(q.shape[0], -1)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of ``attention``: what its launches have in common."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    query_start: Tensor
    context_len: Tensor
    window: int | None
    scale: float
    soft_cap: float | None
    out: Tensor

    @property
    def kv_heads(self) -> int:
        return self.k_cache.shape[1]

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.q.shape[1] // self.kv_heads

    @property
    def rows(self) -> int:
        return self.context_len.shape[0]

    @property
    def cache_shape(self) -> tuple[int, int, int, int, int]:
        """As the kernels take it: heads of a group, KV heads, bits of an offset in a page, dimensions of a head, width
        of the page table."""
        page_size, dim = self.k_cache.shape[2:]
        return self.group, self.kv_heads, page_size.bit_length() - 1, dim, self.page_table.shape[1]

    @property
    def score(self) -> tuple[float, float]:
        """As the kernels take it: factor of q.k and bound of the score, for base 2."""
        if self.soft_cap is None:
            return self.scale * _LOG2_E, 0.0
        return self.scale / self.soft_cap, self.soft_cap * _LOG2_E

    def config(self, kind: str) -> Config:
        return CONFIGS[kind, self.q.dtype.itemsize, power_of_two(self.q.shape[2], _BLOCKS_D[0])]

    def launches(self, max_query: int, max_context: int, shared: SharedPrefixes | None) -> Iterator[Launch]:
        """All of a call, in order. Which rows have one token only the device knows, so each kernel skips the others."""
        if max_query > 1:
            yield self.extend()
        if max_query == 1 or self.rows > 1:
            yield from self.decode(max_context, shared)

    def extend(self) -> Launch:
        """Rows of several tokens."""
        block_m = self.config("extend").block_m
        # Tiles of all rows, and room for an incomplete one of each.
        tiles = self.q.shape[0] * self.group // block_m + self.rows
        args = (
            *(self.q, self.k_cache, self.v_cache, self.page_table, self.query_start, self.context_len, self.out),
            *(self.rows, *self.cache_shape, self.window or _NO_WINDOW, *self.score),
        )
        return self._walk(attention_kernels.extend, "extend", (tiles, self.kv_heads, 1), args)

    def decode(self, max_context: int, shared: SharedPrefixes | None) -> Iterator[Launch]:
        """Rows of one token: what they share, what each has alone, and both put together."""
        heads, dim = self.q.shape[1:]
        row_tiles = cdiv(self.group, self.config("decode").block_m)
        keys = min(max_context, self.window or max_context)
        splits = num_splits(self.rows * row_tiles * self.kv_heads, keys, num_sms(self.q.device))
        slots = splits + (shared.most_results if shared else 0)
        kept = self.rows * slots * heads if slots > 1 else 0
        values = self.q.new_empty(kept, dim, dtype=torch.float32)
        weight = self.q.new_empty(kept, dtype=torch.float32)
        if shared is not None:
            yield self.shared(shared, values, weight, splits, slots)
        args = (
            *(self.q, self.k_cache, self.v_cache, self.page_table, self.query_start, self.context_len),
            *(shared.end if shared else self.context_len, self.out, values, weight, *self.cache_shape),
            *(self.window or _NO_WINDOW, *self.score, row_tiles, splits, slots, int(shared is not None)),
        )
        grid = (self.rows * row_tiles, self.kv_heads, splits)
        yield self._walk(attention_kernels.decode, "decode", grid, args)
        if slots > 1:
            yield self.merge(shared, values, weight, splits, slots)

    def shared(self, shared: SharedPrefixes, values: Tensor, weight: Tensor, splits: int, slots: int) -> Launch:
        """The keys that rows of one token have in common."""
        tiles = cdiv(shared.most_members * self.group, self.config("shared").block_m)
        args = (
            *(self.q, self.k_cache, self.v_cache, self.page_table, self.query_start, shared.items, shared.members),
            *(values, weight, *self.cache_shape, *self.score, splits, slots),
        )
        grid = (shared.items.shape[0], self.kv_heads, tiles)
        return self._walk(attention_kernels.shared, "shared", grid, args)

    def merge(self, shared: SharedPrefixes | None, values: Tensor, weight: Tensor, splits: int, slots: int) -> Launch:
        """One result for each head of a row from its partial ones."""
        heads, dim = self.q.shape[1:]
        counts = shared.count if shared else self.context_len
        args = (values, weight, self.query_start, counts, self.out, heads, dim, splits, slots, int(shared is not None))
        constants = {"BLOCK_D": power_of_two(dim, _BLOCKS_D[0])}
        return Launch(attention_kernels.merge, (self.rows, heads, 1), args, constants)

    def _walk(self, kernel: Any, kind: str, grid: tuple[int, int, int], args: tuple[Any, ...]) -> Launch:
        """A launch of a kernel that walks keys."""
        config = self.config(kind)
        constants = {
            "BLOCK_D": power_of_two(self.q.shape[2], _BLOCKS_D[0]),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "CAPPED": self.soft_cap is not None,
            "PRECISION": "ieee" if self.q.dtype is torch.float32 else "tf32",
        }
        return Launch(kernel, grid, args, constants, config.num_warps, config.num_stages)


def variants() -> Iterator[tuple[str, Launch]]:
    """Every compilation that ``attention`` can ask for: each kernel for each type, head size, and with a cap or not."""
    for name, dtype in NARROW_TYPES.items():
        for dim in _BLOCKS_D:
            for soft_cap in (None, 50.0):
                call = _example(dtype, dim, soft_cap)
                end = "" if soft_cap is None else "-capped"
                launches = [call.extend(), *call.decode(1 << 16, _example_sharing())]
                for kind, launch in zip(("extend", "shared", "decode", "merge"), launches, strict=True):
                    if kind != "merge" or soft_cap is None:  # A merge knows of no cap.
                        yield f"attention_{kind}/{name}-{dim}{end}", launch


def _example(dtype: torch.dtype, dim: int, soft_cap: float | None) -> _Call:
    q, cache = meta(32, 16, dim, dtype=dtype), meta(8, 4, 16, dim, dtype=dtype)
    table, starts, lengths = (meta(*shape, dtype=torch.int32) for shape in ((16, 64), (17,), (16,)))
    return _Call(q, cache, cache, table, starts, lengths, None, dim**-0.5, soft_cap, q)


def _example_sharing() -> SharedPrefixes:
    items, members, rows = (meta(*shape, dtype=torch.int32) for shape in ((3, 4), (32, 2), (16,)))
    return SharedPrefixes(items, members, rows, rows, most_members=16, most_results=3)
