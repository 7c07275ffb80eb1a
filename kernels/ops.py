"""The ops of a forward pass: one public function each.

Each function chooses by device, type and availability: the native CPU kernels of ``kernels.cpu`` for float32 and
bfloat16 tensors on the CPU, those of ``kernels.triton`` for bfloat16 and float16 tensors on a CUDA device, plain torch
(``kernels.reference``, fp32 inside) for everything else.

On the native CPU path a token's result does not depend, bit for bit, on the other tokens of the call, on how a prompt
was cut into chunks, or on the number of threads: every sum has one fixed order. The others promise no such thing.

On a CUDA device a call reads nothing back, so that it can be captured in a graph: rows without tokens and negative
cells stand for what pads a captured batch, and are skipped.

Words: T tokens of a ragged batch of R rows; Hq and Hkv query and KV heads of D dimensions; a KV cache of one layer
is [num_pages, Hkv, page_size, D], and *cell* ``loc`` of it is page ``loc // page_size``, offset ``loc % page_size``.
On a CPU it may be of 8 bits (``kernels.layouts.int8_kv_layout``); attention then rounds queries and weights to 8 bits
too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from .backend import (
    native_for,
    native_for_kv,
    native_kernels,
    native_status,
    on_triton,
    set_threads,
    triton_status,
    use_native,
)
from .cpu.native_calls import Buffers
from .cpu.recorded_pass import RecordedPass
from .layouts.packed_weights import Format, Largest, Linear, PackedLinear, QuantisedLinear
from .triton import shared_prefixes
from .triton.shared_prefixes import Ints, SharedPrefixes, StaticSharedPrefixes

__all__ = [
    "Activation",
    "Buffers",
    "Capture",
    "Largest",
    "Linear",
    "PackedLinear",
    "QuantisedLinear",
    "RecordedPass",
    "SharedPrefixes",
    "StaticSharedPrefixes",
    "add_rms_norm",
    "attention",
    "capture_for",
    "find_shared_prefixes",
    "gated_activation",
    "largest",
    "largest_linear",
    "linear",
    "native_kernels",
    "native_status",
    "on_triton",
    "pack_linear",
    "record",
    "rms_norm",
    "rope_store_kv",
    "set_threads",
    "shares_prefixes",
    "triton_status",
    "use_native",
]

Activation = Literal["silu", "gelu_tanh"]

# Takes a pass, runs it, and returns what runs it again.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Lays a weight [N, K] out once for ``linear`` on the weight's device; a bias [N] goes along.

    Raises:
        ValueError: the weight is not a matrix, or the bias does not fit it.
    """
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        shape = None if bias is None else tuple(bias.shape)
        raise ValueError(f"weight {tuple(weight.shape)} must be [N, K] and bias {shape} must be [N]")
    kernels = native_kernels() if weight.is_cpu else None
    if kernels is not None and kernels.takes_weight(weight):
        return kernels.pack_linear(weight, bias)
    return PackedLinear(weight.shape[1], weight.shape[0], weight.contiguous(), bias, kernels=None)


def linear(x: Tensor, layer: Linear, out_dtype: torch.dtype | None = None) -> Tensor:
    """``x @ weight.T + bias``: [T, K] -> [T, N], x of the weight's type; sums are fp32.

    A quantised weight takes bfloat16 and float32; what it computes is said in ``kernels.quantised_weights``.

    Args:
        out_dtype: the type of x (None), or float32: the sums as they are.
    """
    out_dtype = out_dtype or x.dtype
    if isinstance(layer, QuantisedLinear):
        return layer.kernels.linear(x, layer, out_dtype)
    if layer.kernels is not None:
        return layer.kernels.linear(x, layer, out_dtype)
    if out_dtype is x.dtype:
        return functional.linear(x, layer.weight, layer.bias)
    if x.is_cuda:
        out = torch.mm(x, layer.weight.t(), out_dtype=out_dtype)
        return out if layer.bias is None else out.add_(layer.bias)
    return reference.linear_fp32(x, layer.weight, layer.bias)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` in fp32: [T, H], [H] -> [T, H] of out_dtype, or of x's type."""
    out_dtype = out_dtype or x.dtype
    if on_triton(x.device):
        from .triton import norm

        if norm.takes(x, weight, out_dtype):
            return norm.rms_norm(x, weight, eps, offset, out_dtype)
    kernels = native_for(x)
    if kernels is not None and kernels.takes(weight) and kernels.takes_type(out_dtype):
        return kernels.rms_norm(x, None, weight, eps, offset, out_dtype)
    return reference.rms_norm(x, weight, eps, offset, out_dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """``residual += x`` in place, residual [T, H] in fp32; returns its ``rms_norm`` [T, H] in the type of x."""
    if on_triton(x.device):
        from .triton import norm

        if norm.takes_sum(x, residual, weight):
            return norm.add_rms_norm(x, residual, weight, eps, offset)
    kernels = native_for(x)
    if kernels is not None and kernels.takes(residual) and kernels.takes(weight):
        return kernels.rms_norm(x, residual, weight, eps, offset, x.dtype)
    return reference.add_rms_norm(x, residual, weight, eps, offset)


def rope_store_kv(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    kv_loc: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
) -> Tensor:
    """From the fused projection to rotated q, with K and V written to their cells.

    Args:
        qkv: [T, (Hq + 2 * Hkv) * D]: heads of q, then of k, then of v.
        positions: [T] int64, rows of cos_sin.
        cos_sin: [max_pos, rot_dim] fp32, cosines in the first half and sines in the second, or None for no rotary
            embedding. Dimension i of a head is paired with i + rot_dim / 2 (rotate-half); those past rot_dim stay.
        kv_loc: [T] int64, the cell of each token; on a CUDA device -1 for none.
        k_cache: [num_pages, Hkv, page_size, D] of the type of qkv, written.
        v_cache: the same.
        num_heads: Hq.
        num_kv_heads: Hkv.
        q_norm: [D], the weight of an RMS norm of each query head before the rotation, or None.
        k_norm: [D], the same for key heads.
        eps: of these norms.
        offset: added to their weights.

    Returns:
        q [T, Hq, D].

    Raises:
        IndexError: a position or a cell lies outside its table; some cells may have been written. Not on a CUDA
            device, where nothing waits to see.
    """
    if on_triton(qkv.device):
        from .triton import rope

        if rope.takes(qkv, k_cache, v_cache, q_norm, k_norm):
            return rope.rope_store_kv(
                qkv, positions, cos_sin, kv_loc, k_cache, v_cache, num_heads, num_kv_heads, q_norm, k_norm, eps, offset
            )
    kernels = native_for_kv(qkv, k_cache, v_cache)
    if kernels is not None:
        return kernels.rope_store_kv(
            qkv, positions, cos_sin, kv_loc, k_cache, v_cache, num_heads, num_kv_heads, q_norm, k_norm, eps, offset
        )
    return reference.rope_store_kv(
        qkv, positions, cos_sin, kv_loc, k_cache, v_cache, num_heads, num_kv_heads, q_norm, k_norm, eps, offset
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
    """Causal attention of a ragged batch over paged K and V, prefill and decode alike.

    Rows whose lines of the page table begin alike read these pages together: on the native CPU path always, with the
    bits that each would get alone; on a CUDA device where ``shared`` says so.

    Token i of row r has position ``context_len[r] - query_len[r] + i`` and sees the keys at positions up to its own,
    the last ``window`` of them (itself included) when a window is given. A score is ``s = scale * q.k``, or
    ``soft_cap * tanh(s / soft_cap)``; query head h reads KV head ``h // (Hq / Hkv)``.

    Args:
        q: [T, Hq, D].
        k_cache: [num_pages, Hkv, page_size, D], the KV of the q tokens included.
        v_cache: the same.
        page_table: [R, P] int32, the pages of each row in order.
        query_start: [R + 1] int32, row r owns tokens ``query_start[r]:query_start[r + 1]``.
        context_len: [R] int32, tokens of each row with KV.
        max_query: the longest row's number of tokens.
        max_context: the largest of ``context_len``.
        scale: of the scores.
        window: keys seen by a token, or None for all.
        soft_cap: bound of the scores, or None.
        shared: of this batch, from ``find_shared_prefixes``.

    Returns:
        [T, Hq * D]; on a CUDA device undefined for tokens of no row.

    Raises:
        IndexError: the page table is too short for a row, or names a page that the cache lacks. Not on a CUDA device.
    """
    if on_triton(q.device):
        from .triton import attention as gpu

        if gpu.takes(q, k_cache, v_cache, page_table):
            batch = (page_table, query_start, context_len, max_query, max_context)
            return gpu.attention(
                q, k_cache, v_cache, *batch, scale=scale, window=window, soft_cap=soft_cap, shared=shared
            )
    kernels = native_for_kv(q, k_cache, v_cache)
    if kernels is not None and scale > 0:
        return kernels.attention(q, k_cache, v_cache, page_table, query_start, context_len, scale, window, soft_cap)
    return reference.attention(
        q, k_cache, v_cache, page_table, query_start, context_len, scale=scale, window=window, soft_cap=soft_cap
    )


def find_shared_prefixes(
    page_table: Ints, query_len: Ints, context_len: Ints, page_size: int, device: torch.device
) -> SharedPrefixes | None:
    """The prefixes that rows of a batch should read together, for ``attention``, from what the host knows of it.

    Args:
        page_table: [R, P], the pages of each row in order.
        query_len: [R], the tokens of each row.
        context_len: [R], tokens of each row with KV.
        page_size: tokens of a page.
        device: where the batch is computed.

    Returns:
        Tensors on the host, which go to the device by ``to``; None where nothing is worth it, and for a CPU, whose
        kernels find it for themselves.
    """
    if not on_triton(device):
        return None
    return shared_prefixes.find_shared_prefixes(page_table, query_len, context_len, page_size)


def shares_prefixes(num_rows: int) -> bool:
    """Whether so many rows can have prefixes that ``find_shared_prefixes`` finds."""
    return num_rows >= shared_prefixes.LEAST_SHARERS


def gated_activation(gate_up: Tensor, kind: Activation) -> Tensor:
    """``act(first half) * second half``, computed in fp32: [T, 2 * I] -> [T, I]."""
    if on_triton(gate_up.device):
        from .triton import activation

        if activation.takes(gate_up):
            return activation.gated_activation(gate_up, kind)
    kernels = native_for(gate_up)
    if kernels is not None:
        return kernels.gated_activation(gate_up, kind)
    return reference.gated_activation(gate_up, kind)


def largest(values: Tensor) -> Largest:
    """The largest of each row: [S, V] fp32, V at least 1."""
    kernels = native_for(values)
    if kernels is not None and values.dtype is torch.float32:
        return kernels.largest(values)
    return reference.largest(values)


def largest_linear(x: Tensor, layer: Linear) -> Largest:
    """``largest(linear(x, layer, float32))``; the native CPU path does not write the product to memory."""
    if isinstance(layer, QuantisedLinear):
        searched = layer.format is not Format.WIDENED
        return layer.kernels.largest_linear(x, layer) if searched else largest(linear(x, layer, torch.float32))
    if layer.kernels is not None:
        return layer.kernels.largest_linear(x, layer)
    return largest(linear(x, layer, torch.float32))


def record(forward: Callable[[], Tensor], buffers: Buffers) -> tuple[Tensor, RecordedPass | None]:
    """Run a forward pass over ops of this module, and keep it for later steps of any number of tokens and rows.

    The tensors that ``forward`` reads must live as long as the tape, at their place, with room for the tokens and rows
    of later steps. It may hold no other torch ops than those that make tensors, each op must be for all tokens, and
    nothing may depend on what the tensors hold, or on how many tokens and rows there are.

    Args:
        forward: the pass.
        buffers: where the results of its ops go; those of other recordings may go there too.

    Returns:
        Its result, which each ``Tape.replay`` writes anew into the same memory; and the tape, or None where the pass
        cannot be kept, because some of it runs in plain torch.
    """
    kernels = native_kernels()
    return (forward(), None) if kernels is None else kernels.record(forward, buffers)


def capture_for(k_cache: Tensor) -> Capture | None:
    """What captures passes over a layer's KV cache, or None where some op of a pass reads back from the device."""
    if not (k_cache.is_cuda and on_triton(k_cache.device)):
        return None
    from .triton import attention as gpu
    from .triton import cuda_graph

    q = k_cache.new_empty(0, 1, k_cache.shape[3])
    table = torch.empty(0, 1, dtype=torch.int32, device=k_cache.device)
    return cuda_graph.Capture(k_cache.device) if gpu.takes(q, k_cache, k_cache, table) else None
