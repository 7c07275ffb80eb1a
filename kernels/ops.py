"""The ops of a forward pass: one public function each, computed by native, Triton or plain torch kernels.

Each function chooses by device, type and availability: the native CPU kernels of ``kernels.cpu`` for float32 and
bfloat16 tensors on the CPU, those of ``kernels.triton`` for bfloat16 and float16 tensors on a CUDA device, plain torch
(``kernels.reference``, fp32 inside) for everything else.

On the native CPU path every sum has a fixed order. So the result of a token is bit-identical whatever the other tokens
of the call, the chunks of its prompt and the number of threads are. On a GPU only the kernels that ``use_invariant``
selects give a guarantee like this, plain torch gives none.

On a CUDA device no call reads a value back, so that calls can be captured in a CUDA graph. Rows without tokens and
negative cells pad a captured batch and are skipped.

Notation: T tokens of a ragged batch of R rows; Hq and Hkv query and KV heads of D dimensions. The KV cache of a layer
is [num_pages, Hkv, page_size, D], and its *cell* ``loc`` is page ``loc // page_size``, offset ``loc % page_size``. The
cache may have 8 bits, in forms with other shapes (``kernels.layouts.kv_forms``); on a CPU, attention then rounds
queries and weights to 8 bits too.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from . import gathered_attention, grouped_weights, reference
from .backend import (
    is_invariant,
    native_for,
    native_for_kv,
    native_for_latent,
    native_kernels,
    native_status,
    on_triton,
    set_threads,
    timed_calls,
    triton_status,
    use_invariant,
    use_native,
)
from .column_ops import take_columns
from .layouts.attention_arguments import AttentionParams, HeadNorm, LongRows, PagedBatch, RopeParams, SharedPrefixes
from .layouts.grouped_forms import GroupedLinear
from .layouts.kv_forms import StaticScales
from .layouts.packed_weights import (
    AnyLinear,
    Format,
    JoinedLinear,
    Largest,
    Linear,
    PackedLinear,
    QuantisedLinear,
    parts_of,
)
from .triton import shared_prefixes
from .triton.shared_prefixes import Ints, StaticSharedPrefixes

__all__ = [
    "Activation",
    "AnyLinear",
    "AttentionParams",
    "GroupedLinear",
    "HeadNorm",
    "JoinedLinear",
    "Largest",
    "Linear",
    "LongRows",
    "PackedLinear",
    "PagedBatch",
    "QuantisedLinear",
    "RopeParams",
    "SharedPrefixes",
    "StaticScales",
    "StaticSharedPrefixes",
    "activation",
    "add_layer_norm",
    "add_rms_norm",
    "add_scaled",
    "attention",
    "copy_residual",
    "find_long_rows",
    "find_shared_prefixes",
    "gated_activation",
    "gated_linear",
    "is_invariant",
    "largest",
    "largest_linear",
    "layer_norm",
    "linear",
    "native_kernels",
    "native_status",
    "on_triton",
    "pack_linear",
    "pack_linear_apart",
    "parts_of",
    "rms_norm",
    "rope_store_kv",
    "set_threads",
    "shares_prefixes",
    "timed_calls",
    "triton_status",
    "use_invariant",
    "use_native",
    "xielu",
]

Activation = Literal["silu", "gelu_tanh", "relu2", "gelu"]


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Pack a weight [N, K] and its bias [N] for ``linear`` on the weight's device.

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


def pack_linear_apart(weight: Tensor) -> PackedLinear:
    """Pack like ``pack_linear`` without native calls, so that another thread may compute or record meanwhile."""
    kernels = native_kernels() if weight.is_cpu else None
    if kernels is not None and kernels.takes_weight(weight):
        return kernels.pack_linear_apart(weight)
    return PackedLinear(weight.shape[1], weight.shape[0], weight.contiguous(), None, kernels=None)


def linear(x: Tensor, layer: AnyLinear, out_dtype: torch.dtype | None = None) -> Tensor:
    """``x @ weight.T + bias``: [T, K] -> [T, N], x in the weight's type; sums are fp32.

    With a quantised weight, x is bfloat16 or float32; for the arithmetic see ``kernels.quantised_weights``.

    Args:
        out_dtype: the type of x (None), or float32 for unrounded sums.
    """
    out_dtype = out_dtype or x.dtype
    if isinstance(layer, GroupedLinear):
        return _grouped_linear(x, layer, out_dtype)
    if isinstance(layer, QuantisedLinear):
        return layer.kernels.linear(x, layer, out_dtype)
    if isinstance(layer, JoinedLinear):
        both = (linear(x, part, out_dtype) for part in (layer.first, layer.second))
        return take_columns(layer.columns, *both)
    if layer.kernels is not None:
        return layer.kernels.linear(x, layer, out_dtype)
    if is_invariant(x.device):
        from .triton import invariant_linear as gpu

        if gpu.takes(x, layer.weight):
            return gpu.linear(x, layer.weight, layer.bias, out_dtype)
    if out_dtype is x.dtype and on_triton(x.device):
        from .triton import product_choice

        return product_choice.way_of(x, layer.weight, layer.bias)(x, layer.weight, layer.bias)
    if out_dtype is x.dtype:
        return functional.linear(x, layer.weight, layer.bias)
    if x.is_cuda:
        out = torch.mm(x, layer.weight.t(), out_dtype=out_dtype)
        return out if layer.bias is None else out.add_(layer.bias)
    return reference.linear_fp32(x, layer.weight, layer.bias)


def _grouped_linear(x: Tensor, layer: GroupedLinear, out_dtype: torch.dtype) -> Tensor:
    if on_triton(x.device):
        from .triton import grouped_product as gpu

        if gpu.takes(x, layer):
            return gpu.grouped_linear(x, layer, out_dtype)
    return grouped_weights.grouped_linear(x, layer, out_dtype)


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


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * (offset + weight) + bias`` in fp32; otherwise like ``rms_norm``."""
    out_dtype = out_dtype or x.dtype
    if on_triton(x.device):
        from .triton import layer_norm as gpu

        if gpu.takes(x, weight, bias, out_dtype):
            return gpu.layer_norm(x, weight, bias, eps, offset, out_dtype)
    kernels = native_for(x)
    if kernels is not None and kernels.takes(weight) and kernels.takes_type(out_dtype):
        return kernels.layer_norm(x, None, weight, bias, eps, offset, out_dtype)
    return reference.layer_norm(x, weight, bias, eps, offset, out_dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0
) -> Tensor:
    """``residual += x`` in place, residual [T, H] in fp32; returns its ``layer_norm`` [T, H] in the type of x."""
    kernels = native_for(x)
    if kernels is not None and kernels.takes(residual) and kernels.takes(weight):
        return kernels.layer_norm(x, residual, weight, bias, eps, offset, x.dtype)
    residual.add_(x)
    return layer_norm(residual, weight, bias, eps, offset, x.dtype)


def add_scaled(x: Tensor, residual: Tensor, factor: float, kept: float = 1.0) -> None:
    """``residual = kept * residual + factor * x`` in place: [T, H], fp32 [T, H]."""
    kernels = native_for(x)
    if kernels is not None and kernels.takes(residual):
        kernels.add_scaled(x, residual, factor, kept)
    else:
        reference.add_scaled(x, residual, factor, kept)


def copy_residual(residual: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of an fp32 residual [T, H] in another type."""
    kernels = native_for(residual)
    if kernels is not None and kernels.takes_type(dtype):
        return kernels.copy_residual(residual, dtype)
    return residual.to(dtype, copy=True)


def rope_store_kv(
    qkv: Tensor, positions: Tensor, kv_loc: Tensor, k_cache: Tensor, v_cache: Tensor, params: RopeParams
) -> Tensor:
    """Norm and rotate q and k of the fused projection, and write K and V to their cells.

    A layer without KV heads (``params.num_kv_heads`` 0) reads the KV of another layer, and writes none.

    On a CUDA device, norms other than those of single q and k heads are computed by separate ops before the kernel.

    Args:
        qkv: [T, (Hq + 2 * Hkv) * D]: heads of q, then of k, then of v.
        positions: [T] int64, rows of ``params.cos_sin`` and ``params.query_scale``.
        kv_loc: [T] int64, the cell of each token; on a CUDA device -1 for none.
        k_cache: [num_pages, Hkv, page_size, D] of the type of qkv, written.
        v_cache: the same.
        params: parameters of the layer.

    Returns:
        q [T, Hq, D].

    Raises:
        IndexError: a position or a cell is outside of its table; some cells may have been written. Not raised on a CUDA
            device, as the host does not wait for its results.
    """
    if on_triton(qkv.device):
        from .triton import rope

        if params.norm != "head" or params.has_v_norm:
            qkv, params = reference.norm_apart(qkv, params)
        if params.num_kv_heads and rope.takes(qkv, k_cache, v_cache, params):
            return rope.rope_store_kv(qkv, positions, kv_loc, k_cache, v_cache, params)
    kernels = native_for_kv(qkv, k_cache, v_cache)
    if kernels is not None:
        return kernels.rope_store_kv(qkv, positions, kv_loc, k_cache, v_cache, params)
    return reference.rope_store_kv(qkv, positions, kv_loc, k_cache, v_cache, params)


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, params: AttentionParams) -> Tensor:
    """Causal attention of a ragged batch over paged K and V, for prefill and decode.

    If the page tables of rows have a common prefix, its pages are read once for all of them: on the native CPU path
    always, with the same bits as for each row alone; on a CUDA device if ``batch.shared`` lists the prefix. There torch
    computes the rows of ``batch.long`` over gathered pages, in layers without a window, cap or sinks.

    Token i of row r has position ``context_len[r] - query_len[r] + i``. It sees the keys at positions up to its own;
    with a window only the last ``window`` of them (itself included); with chunks only those from the last multiple of
    ``chunk`` on. A score is ``s = scale * q.k``, or ``soft_cap * tanh(s / soft_cap)``; query head h reads KV head ``h
    // (Hq / Hkv)``. With sinks the weights of a head's keys are ``exp(s) / (exp(sink) + sum of exp(s))``. With
    ``params.value_dim`` values are the first dimensions of the keys.

    Args:
        q: [T, Hq, D].
        k_cache: [num_pages, Hkv, page_size, D], including the KV of the tokens of q.
        v_cache: the same; with ``params.value_dim`` k_cache itself.
        batch: page table and lengths of the rows.
        params: parameters of the layer.

    Returns:
        [T, Hq * D], or [T, Hq * value_dim]; on a CUDA device undefined for tokens that belong to no row.

    Raises:
        IndexError: the page table is too short for a row, or names a page that is not in the cache. Not raised on a
            CUDA device.
    """
    if on_triton(q.device):
        from .triton import attention as gpu

        if gpu.takes(q, k_cache, v_cache, batch.page_table, params.value_dim):
            if batch.long is not None and gathered_attention.takes(k_cache, batch, params):
                return gathered_attention.attention(q, k_cache, v_cache, batch, params, batch.long, gpu.attention)
            return gpu.attention(q, k_cache, v_cache, batch, params, invariant=is_invariant(q.device))
    value_dim = params.value_dim
    kernels = native_for_kv(q, k_cache, v_cache) if value_dim is None else native_for_latent(q, k_cache, value_dim)
    if kernels is not None and params.scale > 0:
        return kernels.attention(q, k_cache, v_cache, batch, params)
    return reference.attention(q, k_cache, v_cache, batch, params)


def find_shared_prefixes(
    page_table: Ints, query_len: Ints, context_len: Ints, page_size: int, device: torch.device
) -> SharedPrefixes | None:
    """Find prefixes that rows of a batch should read together in ``attention``, from the host's copy of the batch.

    Args:
        page_table: [R, P], the pages of each row in order.
        query_len: [R], number of tokens of each row.
        context_len: [R], number of tokens of each row with KV.
        page_size: tokens of a page.
        device: device on which the batch is computed.

    Returns:
        Tensors on the host, moved to the device by ``to``. None if sharing saves no time, and for a CPU, whose kernels
        find common prefixes themselves.
    """
    if not on_triton(device) or is_invariant(device):
        return None
    return shared_prefixes.find_shared_prefixes(page_table, query_len, context_len, page_size)


def find_long_rows(
    page_table: Ints, query_len: Ints, context_len: Ints, page_size: int, device: torch.device
) -> LongRows | None:
    """Choose the rows of a step whose pages ``attention`` gathers, from the host's copy of the batch.

    For the arguments see ``find_shared_prefixes``.

    Returns:
        Tensors on the device. None if no row is long enough, for a CPU, for a GPU without fused attention in torch
        (before sm_80), and with batch-invariant kernels.
    """
    has_fused = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    if not on_triton(device) or is_invariant(device) or not has_fused:
        return None
    return gathered_attention.find_long_rows(page_table, query_len, context_len, page_size, device)


def import_attention() -> None:
    """Import the modules for attention of long prompts on a GPU, as importing them at first use takes seconds."""
    gathered_attention.lower_right_mask()


def shares_prefixes(num_rows: int, device: torch.device) -> bool:
    """Return whether ``find_shared_prefixes`` may find prefixes in a batch of ``num_rows`` rows."""
    return not is_invariant(device) and num_rows >= shared_prefixes.LEAST_SHARERS


def gated_activation(gate_up: Tensor, kind: Activation) -> Tensor:
    """``act(first half) * second half``, computed in fp32: [T, 2 * I] -> [T, I]."""
    return _activated(gate_up, kind, gated=True)


def activation(x: Tensor, kind: Activation) -> Tensor:
    """``act(x)``, computed in fp32: [T, I] -> [T, I], or [T, k, I] -> [T, k, I]."""
    return _activated(x, kind, gated=False)


def xielu(x: Tensor, factors: Tensor) -> Tensor:
    """xIELU (https://arxiv.org/abs/2411.13010), computed in fp32: [T, I] -> [T, I].

    Args:
        factors: [4] fp32: factor of x^2 above 0, factor of e^x - 1 - x up to 0, factor of x everywhere, and the largest
            exponent.
    """
    if (kernels := native_for(x)) is not None:
        return kernels.xielu(x, factors)
    return reference.xielu(x, factors)


def _activated(x: Tensor, kind: Activation, *, gated: bool) -> Tensor:
    if on_triton(x.device):
        from .triton import activation as gpu

        if x.dim() > 2:
            return _activated(x.flatten(0, 1), kind, gated=gated).view(x.shape)
        if gpu.takes(x):
            return gpu.gated_activation(x, kind) if gated else gpu.activation(x, kind)
    kernels = native_for(x)
    if kernels is not None:
        return kernels.activation(x, kind, gated=gated)
    return reference.gated_activation(x, kind) if gated else reference.activation(x, kind)


def gated_linear(x: Tensor, layer: AnyLinear, kind: Activation) -> Tensor:
    """``gated_activation(linear(x, layer), kind)``; the native CPU path does not store the product to memory."""
    if not on_triton(x.device) and not isinstance(layer, GroupedLinear | JoinedLinear):
        if isinstance(layer, QuantisedLinear):
            if layer.kernels.takes_gated(layer):
                return layer.kernels.gated_linear(x, layer, kind)
        elif layer.kernels is not None and layer.kernels.takes_gated(layer):
            return layer.kernels.gated_linear(x, layer, kind)
    return gated_activation(linear(x, layer), kind)


def largest(values: Tensor) -> Largest:
    """Maximum and argmax of each row: [S, V] fp32, V at least 1."""
    kernels = native_for(values)
    if kernels is not None and values.dtype is torch.float32:
        return kernels.largest(values)
    return reference.largest(values)


def largest_linear(x: Tensor, layer: AnyLinear) -> Largest:
    """``largest(linear(x, layer, float32))``; the native CPU path does not store the product to memory."""
    if isinstance(layer, GroupedLinear | JoinedLinear):
        return largest(linear(x, layer, torch.float32))
    if isinstance(layer, QuantisedLinear):
        searched = layer.format not in (Format.WIDENED, Format.FLOAT8)
        return layer.kernels.largest_linear(x, layer) if searched else largest(linear(x, layer, torch.float32))
    if layer.kernels is not None:
        return layer.kernels.largest_linear(x, layer)
    return largest(linear(x, layer, torch.float32))
