"""Launches of Triton attention over paged K and V: extend, decode with split context, shared prefixes.

  extend   rows of several new tokens: the program of a tile of queries reads all keys that the tile sees, and writes
           the tile's result.
  decode   rows of one new token: there are few query vectors, so reading keys takes most of the time. The keys of a row
           are split among programs (flash decoding). The number of programs is proportional to the row's share of all
           keys, so that a long row among short ones gets enough programs. Keys of a prefix that several rows have in
           common (cascade attention) are read once for the queries of all these rows, by further programs of the same
           launch. A partial result is normalised values and log2 of their weight. The program that stores the last
           partial result of a row's head merges all of them, in a fixed order.

Rows without tokens, which pad a captured batch, are skipped. Grids depend only on shapes and on numbers that the host
knows. ``max_context`` only limits the number of parts in decode, so a captured batch may give an upper bound of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..layouts import int8_kv_layout, kv_forms
from ..layouts.attention_arguments import AttentionParams, PagedBatch, SharedPrefixes
from . import attention_kernels
from .launch import Launch, cdiv, is_narrow, is_placed, meta, multiplies_registers, num_sms, power_of_two, shared_bytes

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

# Sizes for KV in rows of 8 bits, which is widened in registers. The kernels compile with few register spills; their
# speed is not measured.
ROW_CONFIGS = {
    (kind, 2, dim): Config(64, 32 if dim == 256 else 64, 8, 2) for kind in ("extend", "shared") for dim in _BLOCKS_D
}

# Sizes for devices whose tensor cores take both operands from registers, on which a program has less shared memory than
# on sm_90. With the sizes above the kernels spill registers there, and latent
# attention does not fit the 99 KiB of all but sm_80. With these they compile without spills. Their speed is not
# measured.
REGISTER_CONFIGS = {
    ("decode", 2, 256): Config(16, 32, 4, 2),
    ("extend", 2, 128): Config(64, 128, 8, 2),
    **{(kind, 2, 512): Config(32, 32, 8, 2) for kind in ("decode_many", "extend", "shared")},
}

# The same for sm_86, sm_89 and sm_120 alone, on which a program has 99 KiB.
SMALL_CONFIGS = {("shared", 2, 128): Config(64, 32, 4, 3)}
_SMALL_SHARED = 100 << 10

# Measured on an H200: more programs than are resident at once wait for the first ones to end.
_PROGRAMS_PER_SM = 4
_MOST_SPLITS = 64
_ROOM = 8  # programs that a grid has for each wanted one: those without keys end at once


def wanted_parts(programs: int, sms: int) -> int:
    """Return the number of parts into which the keys of all rows are split. Each part takes ``programs`` programs."""
    return max(1, _PROGRAMS_PER_SM * sms // programs)


def most_splits(programs: int, max_context: int, sms: int) -> int:
    """Return the largest number of parts of one row, if all rows take ``programs`` programs without a split."""
    room = cdiv(_ROOM * _PROGRAMS_PER_SM * sms, max(programs, 1))
    return max(1, min(room, cdiv(max_context, attention_kernels.LEAST_KEYS.value), _MOST_SPLITS))


def takes(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, value_dim: int | None = None) -> bool:
    """Return whether the kernels support these tensors: heads of 16, 32 ... 256 dimensions, pages of a power of two.

    With ``value_dim``, keys must have up to 512 latent dimensions, which are also the values, and up to 64 rotated
    ones.
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


@functools.cache
def _arrivals(device: torch.device, count: int, stream: int) -> Tensor:
    """Return counters of partial results, all 0 between launches. Launches on the same stream share them.

    The counters are never freed or moved, because captured passes continue to use their address.
    """
    return torch.zeros(count, dtype=torch.int32, device=device)


def _stream(tensor: Tensor) -> int:
    """Return the stream on which kernels of a tensor's device run now."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.device.type == "cuda" else 0


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
        invariant: whether a token's result must have the same bits whatever else is in the step: other rows, or more or
            fewer tokens of its own row. Then one kernel computes all rows, block by block from a row's first key on.
            Long rows are slower.
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
        if key in SMALL_CONFIGS and shared_bytes(self.q.device) < _SMALL_SHARED:
            return SMALL_CONFIGS[key]
        if key in REGISTER_CONFIGS and multiplies_registers(self.q.device):
            return REGISTER_CONFIGS[key]
        return CONFIGS[key]

    def alone(self) -> _Call:
        """Return the call with all keys read by each row for itself."""
        return replace(self, batch=replace(self.batch, shared=None))

    def launches(self) -> Iterator[Launch]:
        """Yield the launches in order. Only the device knows which rows have one token: kernels skip the others."""
        if self.invariant:
            yield self.extend()
            return
        if self.batch.max_query > 1:
            yield self.extend()
        if self.batch.max_query == 1 or self.rows > 1:
            yield self.decode()

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
        return self._walk(attention_kernels.extend, self.config("extend"), (tiles, self.kv_heads, 1), args, more)

    def decode(self) -> Launch:
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
        arrived = _arrivals(self.q.device, power_of_two(self.rows * heads), _stream(self.q))
        context = self.batch.context_len
        prefixes = (context,) * 4 if shared is None else (shared.items, shared.members, shared.end, shared.count)
        lines, own, config = self.rows * row_tiles, self.config("decode"), self.config("decode")
        tiles = items = 0
        if shared is not None:
            config = self.config("shared")
            tiles, items = cdiv(shared.most_members * self.group, config.block_m), shared.items.shape[0]
        layers = cdiv(items * tiles, lines)
        args = (
            *(*self.tensors, context, self.sinks, *prefixes, self.out, values, weight, arrived, self.rows),
            *(*self.cache_shape, self.window, self.chunk, *self.score, row_tiles, wanted_parts(programs, sms), splits),
            *(slots, tiles, items * tiles, layers),
        )
        blocks = {"PREFIX_M": config.block_m if shared else 0, "PREFIX_N": config.block_n if shared else 0}
        more = {**self.counts_sinks, **blocks}
        grid = (lines, self.kv_heads, layers + splits)
        joined = Config(own.block_m, own.block_n, config.num_warps, config.num_stages)
        return self._walk(attention_kernels.decode, joined, grid, args, more)

    def _walk(
        self,
        kernel: Any,
        config: Config,
        grid: tuple[int, int, int],
        args: tuple[Any, ...],
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> Launch:
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
    """Yield variants of ``attention`` to compile: each kernel for each head size, with and without a cap, in bfloat16.

    There are further variants: with sinks for heads of 64 dimensions without a cap, which the models with sinks have;
    of invariant attention and of 8-bit KV for heads of 128 dimensions; and of latent attention. Float16 needs the same
    resources as bfloat16, so it is compiled only for heads of 128 dimensions, as a sample.
    """
    dtype = torch.bfloat16
    for dim in _BLOCKS_D:
        for soft_cap in (None, 50.0):
            end = "" if soft_cap is None else "-capped"
            yield from _kinds(f"bf16-{dim}{end}", _example(dtype, dim, soft_cap))
    yield from _kinds("fp16-128", _example(torch.float16, 128, None))
    yield "attention_extend/bf16-128-invariant", replace(_example(dtype, 128, None), invariant=True).extend()
    yield from _kinds("bf16-64-sinks", _example(dtype, 64, None, sinks=meta(16, dtype=torch.float32)))
    # DeepSeek's latent attention, with few heads and with many.
    few, many = (
        _example(dtype, _MOST_LATENT + _MOST_REST, None, value_dim=_MOST_LATENT, heads=heads) for heads in (16, 128)
    )
    yield from _kinds("bf16-latent", few)
    yield "attention_decode/bf16-latent-128", many.alone().decode()
    # KV in rows of 8 bits, for the heads that most models have.
    for kv, cache in {"int8": kv_forms.INT8, "fp8": kv_forms.FLOAT8}.items():
        yield from _kinds(f"bf16-128-{kv}-kv", _example(torch.bfloat16, 128, None, kv=cache))


def _kinds(name: str, call: _Call) -> Iterator[tuple[str, Launch]]:
    """Yield the launches of a call: of several tokens, of one, and of one with shared prefixes."""
    yield f"attention_extend/{name}", call.extend()
    yield f"attention_decode/{name}", call.alone().decode()
    yield f"attention_shared/{name}", call.decode()


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
