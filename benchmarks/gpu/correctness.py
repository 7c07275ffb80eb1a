"""Every kernel against float64 on the device itself: what interpreter and compiler without a GPU cannot show."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.batches import Batch, make_batch
from benchmarks.gpu.measure import Line, Machine
from rootgraft.kernels import ops

# A result is rounded once, and softmax weights before their product with V.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}


def run(machine: Machine) -> Iterator[Line]:
    """Largest error of each op, as a share of what is tolerated: more than 1 is a failure."""
    dtypes = [torch.float32] if machine.tiny else [torch.bfloat16, torch.float16]
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for op, error in (*_elementwise(machine, dtype), *_attention(machine, dtype)):
            yield Line("correctness", f"{op} {name}", error / TOLERANCE[dtype], "of tolerance")


def error_of(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative where numbers are large. Infinite where a number is missing."""
    difference = (actual.double() - expected).abs() / expected.abs().clamp(min=1.0)
    return float(difference.nan_to_num(nan=float("inf")).max())


def _elementwise(machine: Machine, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    tokens, width = (3, 64) if machine.tiny else (67, 4096)
    x, weight = machine.randn(tokens, width, dtype=dtype), machine.randn(width, dtype=dtype)
    residual = machine.randn(tokens, width, dtype=torch.float32)
    total = residual.double() + x.double()
    yield "rms_norm", error_of(ops.rms_norm(x, weight, 1e-5), _norm(x.double(), weight))
    yield "add_rms_norm", error_of(ops.add_rms_norm(x, residual, weight, 1e-5), _norm(total, weight))
    yield "add_rms_norm residual", error_of(residual, total)
    gate, up = x.double().chunk(2, dim=-1)
    yield "silu", error_of(ops.gated_activation(x, "silu"), torch.nn.functional.silu(gate) * up)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh")
    yield "gelu", error_of(ops.gated_activation(x, "gelu_tanh"), gelu * up)
    for dim in (64,) if machine.tiny else (64, 80, 128, 256):
        for is_normed in (False, True):
            yield f"rope_store_kv {dim}{' normed' if is_normed else ''}", _rope_error(machine, dtype, dim, is_normed)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def _rope_error(machine: Machine, dtype: torch.dtype, dim: int, is_normed: bool) -> float:
    tokens, heads, kv_heads, page_size = (3, 2, 1, 4) if machine.tiny else (67, 8, 2, 16)
    qkv = machine.randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    caches = machine.randn(2, tokens, kv_heads, page_size, dim, dtype=dtype)
    positions = torch.randint(0, 50, (tokens,), device=machine.device)
    cells = torch.randperm(tokens * page_size, device=machine.device)[:tokens]
    angles = torch.rand(50, dim // 2, device=machine.device, dtype=torch.float64) * 6.3
    table = torch.cat([angles.cos(), angles.sin()], 1)
    norms = (machine.randn(dim, dtype=dtype), machine.randn(dim, dtype=dtype)) if is_normed else (None, None)
    params = ops.RopeParams(heads, kv_heads, table.float(), norms[0], norms[1], 1e-5)
    q = ops.rope_store_kv(qkv, positions, cells, caches[0], caches[1], params)
    stored = caches.transpose(2, 3).flatten(1, 2)[:, cells]  # [2, T, Hkv, D]
    parts = qkv.double().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    expected = []
    for part, norm in zip(parts[:2], norms, strict=True):
        first, second = (part if norm is None else _norm(part, norm)).chunk(2, dim=-1)
        cos, sin = angles.cos()[positions][:, None], angles.sin()[positions][:, None]
        expected.append(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))
    errors = (error_of(q, expected[0]), error_of(stored[0], expected[1]), error_of(stored[1], parts[2]))
    return max(errors)


def _attention(machine: Machine, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    dims = (64,) if machine.tiny else (64, 80, 96, 128, 256)
    rows = [(1, 20), (5, 33)] if machine.tiny else [(1, 1), (1, 700), (1, 4097), (300, 300), (129, 1000), (2, 17)]
    for dim in dims:
        for page_size in (1, 16):
            batch = make_batch(machine, rows, heads=8, kv_heads=2, dim=dim, page_size=page_size, dtype=dtype)
            yield f"attention {dim}, pages of {page_size}", _attention_error(batch, None, None)
            yield f"attention {dim}, pages of {page_size}, window, cap", _attention_error(batch, 100, 5.0)
            if dim <= 128:
                yield f"attention {dim}, pages of {page_size}, gathered", _attention_error(batch, None, None, True)
    decode = [(1, 40)] * 3 if machine.tiny else [(1, 1100 + 37 * i) for i in range(40)]
    batch = make_batch(machine, decode, heads=8, kv_heads=2, dim=64 if machine.tiny else 128, dtype=dtype)
    yield "attention, split", _attention_error(batch, None, None)
    pages = 1 if machine.tiny else 65
    batch = make_batch(machine, decode, heads=8, kv_heads=2, dim=128, shared_pages=pages, dtype=dtype)
    yield "attention, shared prefix", _attention_error(batch, None, None)


def _attention_error(batch: Batch, window: int | None, soft_cap: float | None, gathering: bool = False) -> float:
    dim = batch.q.shape[2]
    out = batch.attend(dim**-0.5, window=window, soft_cap=soft_cap, gathering=gathering).view(batch.q.shape)
    starts = batch.query_start.tolist()
    errors = []
    for row, (query, context) in enumerate(batch.rows):
        q = batch.q[starts[row] : starts[row + 1]].double().transpose(0, 1)  # [Hq, query, D]
        group = q.shape[0] // batch.k_cache.shape[1]
        k, v = (
            batch.dense(cache, row).double().repeat_interleave(group, 0) for cache in (batch.k_cache, batch.v_cache)
        )
        scores = q @ k.transpose(1, 2) * dim**-0.5
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(context - query, context, device=q.device)[:, None]
        key = torch.arange(context, device=q.device)
        hidden = (key > position) | (key <= position - (window or context))
        expected = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        errors.append(error_of(out[starts[row] : starts[row + 1]].transpose(0, 1), expected))
    return max(errors)
