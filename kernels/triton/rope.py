"""Triton kernel that norms and rotates q and k and stores K and V in their cells, in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layouts import int8_kv_layout, kv_forms
from ..layouts.attention_arguments import LatentParams, RopeParams
from .attention import as_read, kv_form
from .attention_kernels import INT8_KV, PLAIN_KV
from .launch import NARROW_TYPES, Launch, cdiv, is_narrow, is_placed, meta, power_of_two

_HEADS = {64: 8, 128: 4, 256: 2}  # heads per program, by the dimensions of a head, rounded up
_LATENT_HEADS = 16  # heads per program in latent attention
_MOST_LATENT = 2048  # largest number of dimensions of a cell in latent attention


@triton.jit
def _normed(x, inside, scale, weight, weight_k, index, is_query, is_value, offset, mask):
    """Return x [H, D] of query, key and value heads; query and key heads are multiplied by their scale and weight."""
    gain_q = tl.load(weight + index, mask, other=0.0).to(tl.float32)
    gain_k = tl.load(weight_k + index, mask, other=0.0).to(tl.float32)
    gain = offset + tl.where(is_query[:, None], gain_q[None, :], gain_k[None, :])
    return tl.where(is_value[:, None], x, x * scale[:, None] * gain)


@triton.jit
def _nearest(x):
    """Bits of the integer next to each number, ties to even, for magnitudes below 2^22: the lowest 16 are its own."""
    return (x + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _codes(x, KV: tl.constexpr):
    """Convert numbers within the range of a byte's type to the nearest such numbers, ties to even: fp32 -> uint8."""
    if KV == INT8_KV:
        codes = _nearest(x) & 255
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        small = _nearest(tl.abs(x) * 512.0) & 0xFF
        codes = tl.where(tl.abs(x) < 0.015625, small, tl.minimum(normal, 0x7E)) | ((bits >> 24) & 0x80)
    return codes.to(tl.uint8)


@triton.jit
def _store_bytes(
    k_cache, v_cache, static, result, inside, is_key, is_value, cell, page_head, kv_head, page_bits, dim, d,
    KV: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Write heads of keys and values in 8 bits, each with a scale, if ``is_key`` and ``is_value`` [H] are set.

    ``page_head`` is the head's page among all pages of a head each. STATIC: scales are read from ``static`` for
    ``kv_head``, and numbers are clamped to the byte's range. A NaN makes the scale NaN.
    """
    exact = tl.where(inside, result.to(tl.float32), 0.0)
    LARGEST: tl.constexpr = 127.0 if KV == INT8_KV else 448.0
    if STATIC:
        known = tl.load(static + kv_head, is_key | is_value, other=1.0)
        scaled = tl.div_rn(exact, tl.broadcast_to(known[:, None], exact.shape))
        LEAST: tl.constexpr = -128.0 if KV == INT8_KV else -448.0
        codes = _codes(tl.minimum(tl.maximum(scaled, LEAST), LARGEST), KV)
    else:
        most = tl.max(tl.abs(exact), 1)
        inverse = tl.where(most > 1e-30, LARGEST / tl.maximum(most, 1e-30), 0.0)
        codes = _codes(exact * inverse[:, None], KV)
        known = most / LARGEST
    scale = known + tl.sum(exact * 0.0, 1)
    within = cell & ((1 << page_bits) - 1)
    first = page_head * ((dim + 4) << page_bits)
    at = (first + within * dim)[:, None] + d[None, :]
    scale_at = (first + (dim << page_bits)) // 4 + within
    tl.store(k_cache + at, codes, inside & is_key[:, None])
    tl.store(v_cache + at, codes, inside & is_value[:, None])
    tl.store(k_cache.to(tl.pointer_type(tl.float32)) + scale_at, scale, is_key)
    tl.store(v_cache.to(tl.pointer_type(tl.float32)) + scale_at, scale, is_value)


@triton.jit
def pairs(d, half, INTERLEAVED: tl.constexpr):
    """Return for each dimension of a head whether it is the first of its pair, its partner, and the pair's number.

    Dimension d is paired with d + half, or d - half from half on (INTERLEAVED: with its neighbour, d ^ 1). Numbers are
    meant for dimensions below 2 * half; the others are not rotated.
    """
    if INTERLEAVED:
        is_first = d % 2 == 0
        partner = tl.where(is_first, d + 1, d - 1)
        angle = d // 2
    else:
        is_first = d < half
        partner = tl.where(is_first, d + half, d - half)
        angle = tl.where(is_first, d, d - half)
    return is_first, partner, angle


@triton.jit
def turned_heads(
    x, y, cos, sin, query_factor, q_norm, k_norm, d, partner, is_first, is_query, is_value, rotates, inside, dim, half,
    eps, offset, NORMS: tl.constexpr, LAST: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Return N heads of q, k and v normed and rotated, [N, D] fp32, from their values x and those of partners y.

    ``rotates`` [N, D] are the pairs to rotate, by ``cos`` and ``sin`` [N or 1, D]. For other arguments see the kernels.
    """
    if NORMS and not LAST:
        scale = tl.rsqrt(tl.sum(x * x, 1) / dim + eps)
        x = _normed(x, inside, scale, q_norm, k_norm, d, is_query, is_value, offset, d < dim)
        y = _normed(y, inside, scale, q_norm, k_norm, partner, is_query, is_value, offset, d < 2 * half)
    turned = x * cos + y * tl.where(is_first[None, :], -sin, sin)
    x = tl.where(rotates, turned, x)
    if NORMS and LAST:
        scale = tl.rsqrt(tl.sum(x * x, 1) / dim + eps)
        x = _normed(x, inside, scale, q_norm, k_norm, d, is_query, is_value, offset, d < dim)
    if SCALED:
        x = tl.where(is_query[:, None], x * query_factor, x)
    return x


@triton.jit
def store_heads(
    result, q, k_cache, v_cache, kv_scales, token, head, cell, is_query, is_value, some, inside, heads, kv_heads,
    page_bits, dim, d, KV: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Write N heads [N, D] to q, or to their cells: head ``head`` [N], of the heads of q, k and v, of ``token``.

    ``some`` [N] are the heads that exist, ``inside`` [N, D] their dimensions. ``token`` is one or [N], and so is
    ``cell``; a negative cell is not written.
    """
    tl.store(q + (token * heads + head)[:, None] * dim + d[None, :], result, inside & is_query[:, None])
    stored = some & (cell >= 0)
    kept = inside & stored[:, None]
    page = (cell >> page_bits) * kv_heads
    if KV != PLAIN_KV:
        page_head = page + tl.where(is_value, head - heads - kv_heads, head - heads)
        _store_bytes(
            k_cache, v_cache, kv_scales, result, inside, stored & ~is_query & ~is_value, stored & is_value, cell,
            page_head, head - heads, page_bits, dim, d, KV, STATIC,
        )  # fmt: skip
    else:
        within = cell & ((1 << page_bits) - 1)
        key = (((page + head - heads) << page_bits) + within)[:, None] * dim + d[None, :]
        value = (((page + head - heads - kv_heads) << page_bits) + within)[:, None] * dim + d[None, :]
        tl.store(k_cache + key, result, kept & ~(is_query | is_value)[:, None])
        tl.store(v_cache + value, result, kept & is_value[:, None])


@triton.jit(do_not_specialize=["heads", "kv_heads", "page_bits"])
def _rope_store_kv(
    qkv, positions, cos_sin, query_scale, kv_loc, q_norm, k_norm, q, k_cache, v_cache, kv_scales, heads, kv_heads,
    page_bits, dim, half, eps, offset, NORMS: tl.constexpr, LAST: tl.constexpr, INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, KV: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Program (t, b): heads ``b * BLOCK_H ...`` of token t, of the heads of q, then k, then v.

    The first 2 * half dimensions are rotated, in ``pairs``. LAST: norms come after the rotation. SCALED: queries have a
    factor by position. STATIC: K and V have the scales ``kv_scales`` [2, kv_heads]. A token with a negative cell pads a
    captured batch: its K and V are not stored.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_query = head < heads
    is_value = head >= heads + kv_heads
    some = head < heads + 2 * kv_heads
    d = tl.arange(0, BLOCK_D)
    is_first, partner, angle = pairs(d, half, INTERLEAVED)
    is_paired = d < 2 * half
    source = qkv + (token * (heads + 2 * kv_heads) + head[:, None]) * dim
    inside = some[:, None] & (d < dim)[None, :]
    x = tl.load(source + d[None, :], inside, other=0.0).to(tl.float32)
    rotates = (some & (head < heads + kv_heads))[:, None] & is_paired[None, :]
    y = tl.load(source + partner[None, :], rotates, other=0.0).to(tl.float32)
    angles = cos_sin + tl.load(positions + token) * 2 * half + angle
    cos = tl.load(angles, is_paired, other=1.0)
    sin = tl.load(angles + half, is_paired, other=0.0)
    query_factor = 1.0
    if SCALED:
        query_factor = tl.load(query_scale + tl.load(positions + token))
    x = turned_heads(
        x, y, cos[None, :], sin[None, :], query_factor, q_norm, k_norm, d, partner, is_first, is_query, is_value,
        rotates, inside, dim, half, eps, offset, NORMS, LAST, SCALED,
    )  # fmt: skip
    store_heads(
        x.to(q.dtype.element_ty), q, k_cache, v_cache, kv_scales, token, head, tl.load(kv_loc + token), is_query,
        is_value, some, inside, heads, kv_heads, page_bits, dim, d, KV, STATIC,
    )  # fmt: skip


@triton.jit
def _rotated(
    source, cos_sin, position, half, mask, TURNS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Load the pairs of H vectors at ``source`` [H, 1] and rotate them; no other program writes what this one reads.

    Returns:
        First and second values [H, BLOCK], their columns [1, BLOCK] each, and whether they exist.
    """
    i = tl.arange(0, BLOCK)
    if INTERLEAVED:
        first = 2 * i
        second = first + 1
    else:
        first = i
        second = i + half
    inside = mask & (i < half)[None, :]
    x = tl.load(source + first[None, :], inside, other=0.0).to(tl.float32)
    y = tl.load(source + second[None, :], inside, other=0.0).to(tl.float32)
    if TURNS:
        angles = cos_sin + position * 2 * half + i
        cos = tl.load(angles, i < half, other=1.0)[None, :]
        sin = tl.load(angles + half, i < half, other=0.0)[None, :]
        turned = x * cos - y * sin
        y = y * cos + x * sin
        x = turned
    return x, y, first[None, :], second[None, :], inside


@triton.jit(do_not_specialize=["heads"])
def _rope_store_latent(
    q, kv, positions, cos_sin, kv_loc, norm, cache, heads, plain, latent, half, eps, TURNS: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Program (t, b): heads ``b * BLOCK_H ...`` of token t, whose last dimensions are rotated in place.

    The last program of a token writes its normed latent vector and its rotated key to the cache, unless its cell is
    negative.
    """
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    if tl.program_id(1) < tl.num_programs(1) - 1:
        if not TURNS:
            return
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        source = q + ((token * heads + head) * (plain + 2 * half) + plain)[:, None]
        x, y, first, second, inside = _rotated(
            source, cos_sin, position, half, (head < heads)[:, None], TURNS, INTERLEAVED, BLOCK_R
        )
        tl.store(source + first, x.to(q.dtype.element_ty), inside)
        tl.store(source + second, y.to(q.dtype.element_ty), inside)
    else:
        cell = tl.load(kv_loc + token)
        width = latent + 2 * half
        d = tl.arange(0, BLOCK_L)
        values = tl.load(kv + token * width + d, d < latent, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, 0) / latent + eps)
        weight = tl.load(norm + d, d < latent, other=0.0).to(tl.float32)
        target = cache + cell * width
        tl.store(target + d, (values * scale * weight).to(cache.dtype.element_ty), (d < latent) & (cell >= 0))
        one = tl.arange(0, 1)[:, None]
        key = kv + token * width + latent + one
        a, b, even, odd, some = _rotated(key, cos_sin, position, half, one == 0, TURNS, INTERLEAVED, BLOCK_R)
        place = target + latent + one
        tl.store(place + even, a.to(cache.dtype.element_ty), some & (cell >= 0))
        tl.store(place + odd, b.to(cache.dtype.element_ty), some & (cell >= 0))


def takes_latent(q: Tensor, kv: Tensor, cache: Tensor, params: LatentParams) -> bool:
    """Return whether the kernel supports this latent attention: one type, cells of up to 2048 dimensions."""
    tensors = (q, kv, cache, params.norm)
    return is_narrow(*tensors) and len({tensor.dtype for tensor in tensors}) == 1 and cache.shape[3] <= _MOST_LATENT


def rope_store_latent(
    q: Tensor, kv: Tensor, positions: Tensor, kv_loc: Tensor, cache: Tensor, params: LatentParams
) -> None:
    """``kernels.latent_ops.rope_store_latent``; a negative cell is not written."""
    _latent_launch(q, kv, positions, kv_loc, cache, params).run()


def _latent_launch(
    q: Tensor, kv: Tensor, positions: Tensor, kv_loc: Tensor, cache: Tensor, params: LatentParams
) -> Launch:
    half = params.rotary_dim // 2
    numbers = (params.num_heads, params.plain_dim, params.latent_dim, half, params.eps)
    table = params.cos_sin
    constants = {
        "TURNS": table is not None,
        "INTERLEAVED": params.is_interleaved,
        "BLOCK_H": _LATENT_HEADS,
        "BLOCK_L": power_of_two(params.latent_dim),
        "BLOCK_R": power_of_two(half),
    }
    grid = (q.shape[0], cdiv(params.num_heads, _LATENT_HEADS) + 1, 1)
    angles = q.new_empty(0, dtype=torch.float32) if table is None else table
    args = (q, kv, positions, angles, kv_loc, params.norm, cache, *numbers)
    return Launch(_rope_store_latent, grid, args, constants)


def takes(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, params: RopeParams) -> bool:
    """Return whether the kernel supports this: heads of 16, 32 ... 256 dimensions, with or without norms of heads."""
    page_size, dim = k_cache.shape[2], kv_forms.head_dim(k_cache)
    typed = (qkv,) if kv_forms.is_rows(k_cache) else (qkv, k_cache, v_cache)
    norms = [norm for norm in (params.q_norm, params.k_norm) if norm is not None]
    return (
        is_narrow(*typed, *norms)
        and is_placed(k_cache, v_cache)
        and len({tensor.dtype for tensor in (*typed, *norms)}) == 1
        and len(norms) != 1
        and (params.norm == "head" or not norms)
        and dim % 16 == 0
        and dim <= max(_HEADS)
        and page_size & (page_size - 1) == 0
    )


def rope_store_kv(
    qkv: Tensor, positions: Tensor, kv_loc: Tensor, k_cache: Tensor, v_cache: Tensor, params: RopeParams
) -> Tensor:
    """``kernels.ops.rope_store_kv``: [T, (Hq + 2 * Hkv) * D] -> q [T, Hq, D]; a negative cell is not written."""
    q = qkv.new_empty(qkv.shape[0], params.num_heads, kv_forms.head_dim(k_cache))
    launch_of(qkv, positions, kv_loc, k_cache, v_cache, q, params).run()
    return q


def launch_of(
    qkv: Tensor, positions: Tensor, kv_loc: Tensor, k_cache: Tensor, v_cache: Tensor, q: Tensor, params: RopeParams
) -> Launch:
    """Return the launch of ``rope_store_kv``, whose queries go to ``q`` [T, Hq, D]."""
    tokens, heads, dim = q.shape
    kv_heads, cos_sin = params.num_kv_heads, params.cos_sin
    block_d = power_of_two(dim, min(_HEADS))
    block_h = _HEADS[block_d]
    nothing = q.new_empty(0, dtype=torch.float32)
    tables = (nothing if each is None else each for each in (cos_sin, params.query_scale))
    norms = (qkv if norm is None else norm for norm in (params.q_norm, params.k_norm))
    half = 0 if cos_sin is None else cos_sin.shape[1] // 2
    numbers = (heads, kv_heads, k_cache.shape[2].bit_length() - 1, dim, half, params.eps, params.offset)
    static = kv_forms.static_of(k_cache, params.kv_scales)
    caches = as_read(k_cache), as_read(v_cache), nothing if static is None else static
    args = (qkv, positions, *tables, kv_loc, *norms, q, *caches, *numbers)
    constants = {
        "KV": kv_form(k_cache),
        "STATIC": static is not None,
        "NORMS": params.q_norm is not None,
        "LAST": params.is_normed_last,
        "INTERLEAVED": params.is_interleaved,
        "SCALED": params.query_scale is not None,
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
    }
    return Launch(_rope_store_kv, (tokens, cdiv(heads + 2 * kv_heads, block_h), 1), args, constants)


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield every compilation of ``rope_store_kv``: by type, head size, norms, pairs, alignment of the rotated half."""
    for name, dtype in NARROW_TYPES.items():
        for dim in _HEADS:
            for half, aligned in ((dim // 2, ""), (dim // 2 - 8, "-unaligned")):
                for is_normed in (False, True):
                    end = "-normed" if is_normed else ""
                    yield f"rope_store_kv/{name}-{dim}{end}{aligned}", _example(dtype, dim, half, is_normed)
                pairs = f"rope_store_kv/{name}-{dim}-interleaved{aligned}"
                yield pairs, _example(dtype, dim, half, False, is_interleaved=True)
            yield f"rope_store_kv/{name}-{dim}-last", _example(dtype, dim, dim // 2, True, is_normed_last=True)
            scale = meta(64, dtype=torch.float32)
            yield f"rope_store_kv/{name}-{dim}-scaled", _example(dtype, dim, dim // 2, False, query_scale=scale)
        for kv, cache in {"int8": kv_forms.INT8, "fp8": kv_forms.FLOAT8}.items():
            yield f"rope_store_kv/{name}-128-{kv}-kv", _example(dtype, 128, 64, False, kv=cache)
            scales = kv_forms.StaticScales("int8" if kv == "int8" else "fp8", meta(2, 2, dtype=torch.float32))
            yield (
                f"rope_store_kv/{name}-128-{kv}-kv-static",
                _example(dtype, 128, 64, False, kv=cache, kv_scales=scales),
            )
        for is_interleaved, pairs in ((True, "-interleaved"), (False, "")):
            yield f"rope_store_latent/{name}{pairs}", _latent_example(dtype, is_interleaved)


def _example(
    dtype: torch.dtype, dim: int, half: int, is_normed: bool, kv: torch.dtype | None = None, **options: Any
) -> Launch:
    qkv, q = (meta(*shape, dtype=dtype) for shape in ((2, 12 * dim), (2, 8, dim)))
    width = dim if kv is None else dim + int8_kv_layout.SCALE_BYTES
    cache = meta(4, 2, 16, width, dtype=kv or dtype)
    tokens, table = meta(2, dtype=torch.int64), meta(64, 2 * half, dtype=torch.float32)
    norm = meta(dim, dtype=dtype) if is_normed else None
    params = RopeParams(8, 2, table, norm, norm, 1e-5, 0.0, **options)
    return launch_of(qkv, tokens, tokens, cache, cache, q, params)


def _latent_example(dtype: torch.dtype, is_interleaved: bool) -> Launch:
    q, kv, cache = (meta(*shape, dtype=dtype) for shape in ((2, 16 * 192), (2, 576), (4, 1, 16, 576)))
    tokens, table = meta(2, dtype=torch.int64), meta(64, 64, dtype=torch.float32)
    params = LatentParams(16, 128, 64, table, meta(512, dtype=dtype), 1e-6, is_interleaved)
    return _latent_launch(q, kv, tokens, tokens, cache, params)
