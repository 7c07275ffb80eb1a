"""Every op in plain torch, computed in fp32: the tests' oracle, and the path of devices without a kernel.

The functions have the signatures of their namesakes in ``kernels.ops``, except ``linear``, which takes the plain
weight. Inputs of any floating type are widened to fp32, and results are rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from .layouts import kv_forms
from .layouts.attention_arguments import AttentionParams, PagedBatch, RopeParams
from .layouts.packed_weights import Largest

_QUERY_BLOCK = 256  # Number of query tokens that are scored at once: limits the [Hq, block, context] fp32 scores.
_WEIGHT_BLOCK = 4096  # Number of rows of a weight that are widened at once.
_MAXIMA_BLOCK = 64  # columns


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``: [T, K], [N, K], [N] or None -> [T, N] in the type of x."""
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def linear_fp32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` in fp32: [T, K], [N, K], [N] or None -> [T, N]. Widens a part of the weight at a time."""
    x = x.float()
    out = torch.cat([functional.linear(x, part.float()) for part in weight.split(_WEIGHT_BLOCK)], dim=1)
    return out if bias is None else out.add_(bias)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last dimension."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (offset + weight.float())).to(out_dtype or x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Add x to the fp32 residual in place and return the norm of the sum, in the type of x."""
    residual.add_(x)
    return rms_norm(residual, weight, eps, offset, x.dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * (offset + weight) + bias`` over the last dimension."""
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (offset + weight.float())
    return (normed if bias is None else normed + bias.float()).to(out_dtype or x.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0
) -> Tensor:
    """Add x to the fp32 residual in place and return the layer norm of the sum, in the type of x."""
    residual.add_(x)
    return layer_norm(residual, weight, bias, eps, offset, x.dtype)


def add_scaled(x: Tensor, residual: Tensor, factor: float, kept: float = 1.0) -> None:
    """``residual = kept * residual + factor * x`` in fp32, in place."""
    if kept != 1.0:
        residual.mul_(kept)
    residual.add_(x, alpha=factor)


def norm_heads(x: Tensor, weight: Tensor | None, params: RopeParams) -> Tensor:
    """Return the heads x [T, H, D] with the norm of ``params``, in the type of x; x itself without a weight."""
    if weight is None:
        return x
    match params.norm:
        case "head":
            return rms_norm(x, weight, params.eps, params.offset)
        case "projection":
            return rms_norm(x.flatten(1), weight, params.eps, params.offset).view_as(x)
        case "centred":
            return layer_norm(x, weight, None, params.eps, params.offset)
        case "biased":
            return layer_norm(x, weight[0], weight[1], params.eps, params.offset)


def norm_apart(qkv: Tensor, params: RopeParams) -> tuple[Tensor, RopeParams]:
    """Norm q, k and v of the fused projection in its type; return it, and the parameters for the remaining kernel."""
    tokens, heads, kv_heads = qkv.shape[0], params.num_heads, params.num_kv_heads
    q, k, v = qkv.view(tokens, heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), dim=1)
    q, k = norm_heads(q, params.q_norm, params), norm_heads(k, params.k_norm, params)
    if params.has_v_norm:
        v = _norm_values(v, params.eps)
    return torch.cat((q, k, v), dim=1).view_as(qkv), replace(params, q_norm=None, k_norm=None, has_v_norm=False)


def _norm_values(v: Tensor, eps: float) -> Tensor:
    """Return the RMS norm, without a weight, of each head of v [T, H, D], in the type of v."""
    return rms_norm(v, torch.ones(v.shape[-1], device=v.device), eps)


def rotate(x: Tensor, cos_sin: Tensor, is_interleaved: bool = False) -> Tensor:
    """Rotary embedding of x [T, H, D] in fp32 by the rows cos_sin [T, rot_dim]; dimensions past rot_dim stay."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[:, None, :half].float(), cos_sin[:, None, half:].float()
    if is_interleaved:
        even, odd, rest = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]
        pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        return torch.cat((pairs.flatten(-2), rest), dim=-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rope_store_kv(
    qkv: Tensor, positions: Tensor, kv_loc: Tensor, k_cache: Tensor, v_cache: Tensor, params: RopeParams
) -> Tensor:
    """Norm and rotate q and k, write k and v to their cells, return q [T, Hq, D]."""
    num_heads, num_kv_heads = params.num_heads, params.num_kv_heads
    tokens, head_dim, page_size = qkv.shape[0], kv_forms.head_dim(k_cache), k_cache.shape[2]
    heads = qkv.view(tokens, num_heads + 2 * num_kv_heads, head_dim)
    q: Tensor
    q, k, v = heads.float().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if not params.is_normed_last:
        q, k = norm_heads(q, params.q_norm, params), norm_heads(k, params.k_norm, params)
    if params.cos_sin is not None:
        rows = params.cos_sin[positions]
        q, k = rotate(q, rows, params.is_interleaved), rotate(k, rows, params.is_interleaved)
    if params.is_normed_last:
        q, k = norm_heads(q, params.q_norm, params), norm_heads(k, params.k_norm, params)
    if params.query_scale is not None:
        q = q * params.query_scale[positions, None, None]
    if params.has_v_norm:
        v = _norm_values(v, params.eps)
    if num_kv_heads:
        kv_forms.store(k_cache, v_cache, kv_loc // page_size, kv_loc % page_size, k, v.to(qkv.dtype), params.kv_scales)
    return q.to(qkv.dtype)


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, params: AttentionParams) -> Tensor:
    """Causal attention of a ragged batch over paged K and V: q [T, Hq, D] -> [T, Hq * D], or * value_dim."""
    value_dim = q.shape[2] if params.value_dim is None else params.value_dim
    out = q.new_empty(*q.shape[:2], value_dim)
    starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
    for row, context in enumerate(contexts):
        k = _gather(k_cache, batch.page_table[row], context, kv_forms.keys)
        v = _gather(v_cache, batch.page_table[row], context, kv_forms.values)[..., :value_dim]
        offset = context - (starts[row + 1] - starts[row]) - starts[row]  # position of a token less its index in q
        for begin in range(starts[row], starts[row + 1], _QUERY_BLOCK):
            end = min(begin + _QUERY_BLOCK, starts[row + 1])
            out[begin:end] = _attend(q[begin:end], k, v, begin + offset, params).to(q.dtype)
    return out.view(q.shape[0], -1)


def _gather(cache: Tensor, pages: Tensor, context: int, read: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the first ``context`` tokens of a row as [Hkv, context, D] in fp32."""
    page_size = cache.shape[2]
    used = read(cache[pages[: -(-context // page_size)].long()])  # [pages, Hkv, page, D]
    return used.transpose(0, 1).flatten(1, 2)[:, :context].float()


def _attend(q: Tensor, k: Tensor, v: Tensor, first: int, params: AttentionParams) -> Tensor:
    """Attention of tokens at positions first, first + 1, ...: q [n, Hq, D], k, v [Hkv, C, D or V] -> [n, Hq, V]."""
    tokens, heads, head_dim = q.shape
    grouped = q.float().view(tokens, k.shape[0], heads // k.shape[0], head_dim).permute(1, 2, 0, 3)
    scores = grouped @ k[:, None].transpose(-1, -2) * params.scale  # [Hkv, G, n, C]
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    position = torch.arange(first, first + tokens, device=q.device)[:, None]
    key = torch.arange(k.shape[1], device=q.device)
    hidden = key > position
    if params.window is not None:
        hidden |= key <= position - params.window
    if params.chunk is not None:
        hidden |= key < position // params.chunk * params.chunk
    scores = scores.masked_fill_(hidden, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.float().view(k.shape[0], -1, 1, 1).expand(-1, -1, tokens, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v[:, None]).permute(2, 0, 1, 3).reshape(tokens, heads, -1)


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """``act(first half) * second half`` over the last dimension; ``kind`` as in ``activate``."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (activate(gate, kind) * up).to(gate_up.dtype)


def activation(x: Tensor, kind: str) -> Tensor:
    """``act(x)``, computed in fp32, in the type of x."""
    return activate(x.float(), kind).to(x.dtype)


def activate(x: Tensor, kind: str) -> Tensor:
    """SiLU, GELU by tanh, the square of ReLU, or GELU: "silu", "gelu_tanh", "relu2" or "gelu"."""
    if kind == "relu2":
        return functional.relu(x).square()
    return (
        functional.silu(x)
        if kind == "silu"
        else functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    )


def xielu(x: Tensor, factors: Tensor) -> Tensor:
    """xIELU with the factors [4] of ``kernels.ops.xielu``, computed in fp32, in the type of x."""
    above, below, line, highest = factors.unbind()
    wide = x.float()
    curve = torch.where(wide > 0, above * wide * wide, below * (torch.expm1(wide.minimum(highest)) - wide))
    return (curve + line * wide).to(x.dtype)


def largest(values: Tensor) -> Largest:
    """Return maximum and argmax of each row.

    torch vectorises maxima of blocks but not the argmax of a row. So two stages are five times as fast on a CPU.
    """
    missing = -values.shape[1] % _MAXIMA_BLOCK
    blocks = functional.pad(values, (0, missing), value=-torch.inf) if missing else values
    blocks = blocks.unflatten(1, (-1, _MAXIMA_BLOCK))
    best, block = blocks.amax(2).max(1)
    within = blocks.gather(1, block[:, None, None].expand(-1, -1, _MAXIMA_BLOCK)).squeeze(1).argmax(1)
    return Largest(best, block * _MAXIMA_BLOCK + within)


def copy_pages(k: Tensor, v: Tensor | None, source: Sequence[int], target: Sequence[int], count: Sequence[int]) -> None:
    """Copy the first count[i] cells of page source[i] to page target[i] in all layers, in list order."""
    for origin, destination, cells in zip(source, target, count, strict=True):
        for cache in (k,) if v is None else (k, v):
            cache[:, destination, :, :cells] = cache[:, origin, :, :cells]
