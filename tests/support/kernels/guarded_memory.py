"""Tensors that end, or begin, where memory ends that may be touched: a step outside ends the process.

    python -m support.kernels.guarded_memory {start,end} THREADS

runs the native kernels on such tensors, results and packed weights among them, and says ``whole``.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rootgraft.kernels import (
    column_ops,
    expert_ops,
    latent_ops,
    lora_ops,
    memory,
    ops,
    quantised_weights,
    sampling_ops,
    state_ops,
)
from rootgraft.kernels.cpu import arena
from rootgraft.kernels.layouts import int8_kv_layout
from rootgraft.kernels.layouts.draw_params import DrawParams

Guard = Callable[[Tensor], Tensor]
TYPES = torch.bfloat16, torch.float32
ROWS = 1, 2, 5, 16, 17, 33, 140


class GuardedMemory:
    """Makes such tensors, which are never freed.

    Args:
        at_end: whether unmapped memory follows a tensor, and does not precede it.
    """

    def __init__(self, *, at_end: bool) -> None:
        self._at_end = at_end
        self._kept: list[mmap.mmap] = []
        self._protect: Any = ctypes.CDLL(None).mprotect
        self._protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros."""
        count = math.prod(shape)
        size = max(1, count) * dtype.itemsize
        pages = -(-size // mmap.PAGESIZE)
        block = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
        self._kept.append(block)
        base = ctypes.addressof(ctypes.c_char.from_buffer(block))
        for page in (0, pages + 1):
            assert self._protect(base + page * mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0
        start = mmap.PAGESIZE + (pages * mmap.PAGESIZE - size if self._at_end else 0)
        return torch.frombuffer(block, dtype=dtype, count=max(1, count), offset=start)[:count].view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return its values in such memory."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def products(guard: Guard, dtype: torch.dtype) -> None:
    for columns, width in ((1, 2), (17, 34), (70, 62), (96, 256), (9, 1216)):
        weight, bias = guard(torch.randn(columns, width).to(dtype)), guard(torch.randn(columns).to(dtype))
        gated = ops.pack_linear(guard(torch.randn(32 * columns, width).to(dtype)))
        layers: list[ops.Linear] = [ops.pack_linear(weight, bias)]
        layers += [quantised_weights.pack_channels(weight, bias, dynamic=dynamic) for dynamic in (False, True)]
        for rows in ROWS:
            x = guard(torch.randn(rows, width).to(dtype))
            x[:, 0] *= 100  # an outlier in each row
            ops.gated_linear(x, gated, "silu")
            for layer in layers:
                ops.linear(x, layer)
                ops.linear(x, layer, torch.float32)
                ops.largest_linear(x, layer)


def blocks(guard: Guard, dtype: torch.dtype) -> None:
    for name, (values, size) in quantised_weights.BLOCK_SIZES.items():
        for columns, width in ((17, 256), (96, 768)):
            raw = torch.zeros(columns, width // values, size, dtype=torch.uint8)
            # Factors, whose places are the first or the last four bytes, are 0.
            raw[..., 4:-4] = torch.randint(256, raw[..., 4:-4].shape, dtype=torch.uint8)
            of_rows = guard(raw.flatten(1))
            widened = quantised_weights.pack_blocks(of_rows, name, widened=True)
            layers = [widened, quantised_weights.with_widened(widened, dtype, few_rows=4)]
            for dynamic in (False, True):
                if not quantised_weights.is_widened_only(name, dynamic=dynamic):
                    layers.append(quantised_weights.pack_blocks(of_rows, name, dynamic=dynamic))
            quantised_weights.rows(widened, guard(torch.tensor([columns - 1, 0])))
            for rows in ROWS:
                x = guard(torch.randn(rows, width).to(dtype))
                for layer in layers:
                    ops.linear(x, layer)
                    ops.largest_linear(x, layer)


def elementwise(guard: Guard, dtype: torch.dtype) -> None:
    for rows, width in ((1, 2), (3, 34), (100, 256), (7, 1216)):
        x, weight = guard(torch.randn(rows, width).to(dtype)), guard(torch.randn(width).to(dtype))
        residual = guard(torch.randn(rows, width))
        ops.rms_norm(x, weight, 1e-5)
        ops.add_rms_norm(x, residual, weight, 1e-5)
        ops.add_layer_norm(x, residual, weight, weight, 1e-5)
        ops.add_scaled(x, residual, 0.5)
        ops.copy_residual(residual, dtype)
        ops.gated_activation(x, "silu")
        ops.activation(x, "relu2")


def attention(guard: Guard, dtype: torch.dtype) -> None:
    shapes = (1, 16, 9, 3), (16, 64, 4, 1), (3, 80, 6, 2), (32, 128, 8, 8), (16, 256, 2, 1), (128, 64, 6, 2)
    for page, dim, heads, kv_heads in shapes:
        rows = [(40, 300), (1, 1), (1, 65), (33, 33), (1, 290)]
        lengths = [context for _, context in rows]
        pages = [-(-length // page) for length in lengths]
        table = torch.zeros(len(rows), max(pages), dtype=torch.int32)
        for row, count in enumerate(pages):
            table[row, :count] = torch.arange(count) + sum(pages[:row])
        shared = 272 // page  # of the first and the last row
        table[4, :shared] = table[0, :shared]
        starts = torch.tensor([0, *(tokens for tokens, _ in rows)]).cumsum(0)
        index = [guard(each.int()) for each in (table, starts, torch.tensor(lengths))]
        batch = ops.PagedBatch(*index, 40, 300)
        q, sinks = guard(torch.randn(int(starts[-1]), heads, dim).to(dtype)), guard(torch.randn(heads))
        qkv = guard(torch.randn(2, (heads + 2 * kv_heads) * dim).to(dtype))
        norm, cos_sin = guard(torch.randn(dim).to(dtype)), guard(torch.randn(5, dim // 2))
        cells, positions = guard(torch.tensor([0, sum(pages) * page - 1])), guard(torch.tensor([0, 4]))
        for int8 in (False, True) if page % int8_kv_layout.CELLS == 0 else (False,):
            width = dim + int8_kv_layout.SCALE_BYTES if int8 else dim
            cache = torch.zeros(sum(pages), kv_heads, page, width, dtype=int8_kv_layout.DTYPE if int8 else dtype)
            k, v = guard(cache), guard(cache)
            ops.rope_store_kv(qkv, positions, cells, k, v, ops.RopeParams(heads, kv_heads, cos_sin, norm, norm, 1e-6))
            memory.copy_pages(k[None], v[None], [0], [sum(pages) - 1], [page])
            for more in ({}, {"window": 50, "soft_cap": 9.0}, {"sinks": sinks}, {"chunk": 64}):
                ops.attention(q, k, v, batch, ops.AttentionParams(0.1, **more))


def latent_attention(guard: Guard, dtype: torch.dtype) -> None:
    q, kv = guard(torch.randn(20, 3 * 72).to(dtype)), guard(torch.randn(20, 64).to(dtype))
    positions, cells = guard(torch.arange(20)), guard(torch.arange(20) + 28)
    cache = guard(torch.zeros(3, 1, 16, 64, dtype=dtype))
    params = latent_ops.LatentParams(
        3, 56, 16, guard(torch.randn(20, 16)), guard(torch.rand(48).to(dtype)), 1e-6, False
    )
    latent_ops.rope_store_latent(q, kv, positions, cells, cache, params)
    absorbing = expert_ops.ExpertWeights(tuple(ops.pack_linear(guard(torch.randn(48, 56).to(dtype))) for _ in range(3)))
    queries = latent_ops.latent_queries(q, absorbing)
    index = [guard(torch.tensor(each, dtype=torch.int32)) for each in ([[0, 1, 2]], [0, 20], [48])]
    ops.attention(queries, cache, cache, ops.PagedBatch(*index, 20, 48), ops.AttentionParams(0.1, value_dim=48))


def experts(guard: Guard, dtype: torch.dtype) -> None:
    params = expert_ops.RouterParams(
        2, "sigmoid", True, 2.5, guard(torch.randn(6)), guard(torch.rand(6)), groups=3, top_groups=2, best_of_group=2
    )
    plain = [guard(torch.randn(40, 48).to(dtype)) for _ in range(6)]
    kinds = (
        [ops.pack_linear(each) for each in plain],
        [quantised_weights.pack_channels(each, dynamic=True) for each in plain],
    )
    table = lora_ops.SlotTable((40,), 48, 6, dtype)
    table.put(5, adapter(guard, (40,), 48, (3,), dtype))
    for rows in ROWS:
        routing = expert_ops.route(guard(torch.randn(rows, 6)), params)
        index = [guard(torch.tensor(each, dtype=torch.int32)) for each in (list(range(rows)), [0], [0, rows])]
        x, gate = guard(torch.randn(rows, 48).to(dtype)), guard(torch.randn(rows, 1))
        for kind in kinds:
            y = expert_ops.expert_linear(x, expert_ops.ExpertWeights(tuple(kind)), routing.experts)
            lora_ops.lora_experts(y, x, routing.experts, table, 6, lora_ops.Segments(*index))
            y = expert_ops.expert_activation(y, "silu", routing.weights)
            expert_ops.sum_experts(y, routing.weights, guard(torch.randn(rows, 20).to(dtype)), gate)


def adapter(
    guard: Guard, sizes: tuple[int, ...], width: int, ranks: tuple[int, ...], dtype: torch.dtype
) -> lora_ops.Factors:
    b = torch.cat([lora_ops.pack_expansion(torch.randn(*each)) for each in zip(sizes, ranks, strict=True)])
    a, gain = guard(torch.randn(sum(ranks), width).to(dtype)), guard(torch.rand(sum(sizes)))
    return lora_ops.Factors(a, guard(torch.rand(sum(ranks))), ranks, guard(b.to(dtype)), gain, gain)


def adapters(guard: Guard, dtype: torch.dtype) -> None:
    sizes, width = (70, 17, 33), 38
    table = lora_ops.SlotTable(sizes, width, 2, dtype)
    table.put(0, adapter(guard, sizes, width, (3, 0, 17), dtype))
    table.put(1, adapter(guard, sizes, width, (1, 9, 2), dtype))
    for rows in ROWS[1:]:
        index = [guard(torch.tensor(each, dtype=torch.int32)) for each in (list(range(rows)), [0, 1], [0, 1, rows])]
        for y_type in (dtype, torch.float32):
            y, x = guard(torch.zeros(rows, sum(sizes), dtype=y_type)), guard(torch.randn(rows, width).to(dtype))
            lora_ops.lora_shrink_expand(y, x, table, lora_ops.Segments(*index))


def states(guard: Guard, dtype: torch.dtype) -> None:
    index = [
        guard(torch.tensor(each, dtype=torch.int32)) for each in ([0, 5, 6], [-1, 0], [1, 2], [-1, 0, -1, -1, 2, -1])
    ]
    batch = state_ops.StateBatch(*index)
    conv = state_ops.ConvParams(guard(torch.randn(4, 48).to(dtype)), guard(torch.randn(48).to(dtype)), gated=False)
    state_ops.causal_conv(
        guard(torch.randn(6, 80).to(dtype)), guard(torch.zeros(3, 3, 48, dtype=dtype)), batch, conv, 32
    )
    vectors = [guard(torch.randn(4)) for _ in range(3)]
    scan = state_ops.SsmParams(4, 16, 2, 24, -vectors[0].abs(), *vectors[1:])
    x, steps = guard(torch.randn(6, scan.columns).to(dtype)), guard(torch.randn(6, 9).to(dtype))
    state_ops.ssm_scan(x, steps, 5, guard(torch.zeros(3, 4, 24, 16)), batch, scan)
    decay, bias, skip = (guard(torch.rand(*shape)) for shape in ((24, 48), (48,), (48,)))
    selected = [guard(torch.randn(6, size).to(dtype)) for size in (48, 48, 48)]
    selective = state_ops.SelectiveParams(-decay, bias, skip)
    state_ops.selective_scan(*selected, guard(torch.zeros(3, 1, 24, 48)), batch, selective)
    gate = guard(torch.randn(6, 70).to(dtype))
    weight = guard(torch.rand(64).to(dtype))
    for is_first in (False, True):
        norm = state_ops.GatedNormParams(weight, 1e-5, 2, is_first)
        state_ops.gated_norm(guard(torch.randn(6, 64).to(dtype)), gate, norm, 6)
    for heads, dim in ((4, 16), (2, 32)):
        vectors = [guard(torch.randn(heads)) for _ in range(2)]
        delta = state_ops.DeltaParams(heads, dim, 2, 48, -vectors[0].abs(), vectors[1])
        x, gates = guard(torch.randn(6, delta.columns).to(dtype)), guard(torch.randn(6, 2 * heads).to(dtype))
        state_ops.delta_scan(x, gates, (heads, 0), guard(torch.zeros(3, heads, 48, dim)), batch, delta)


def columns(guard: Guard, dtype: torch.dtype) -> None:
    runs = column_ops.ColumnRuns.of([(0, 3, 5), (1, 16, 3), (0, 0, 1)])
    runs = replace(runs, table=guard(runs.table))
    scaled = replace(runs, factors=guard(torch.tensor([0.5, 2.0, 3.0])))
    for rows in ROWS:
        x, other = guard(torch.randn(rows, 8).to(dtype)), guard(torch.randn(rows, 19).to(dtype))
        column_ops.take_columns(runs, x, other)
        column_ops.take_columns(scaled, x, other)
        column_ops.output_gate(guard(torch.randn(rows, 16).to(dtype)), other, 3)


def sampling(guard: Guard, _: torch.dtype) -> None:
    for columns in (1, 17, 64, 3001):
        logits = guard(torch.randn(3, columns))
        ops.largest(logits)
        words = guard(torch.randint(1 << 31, (2, -(-columns // 32)), dtype=torch.int32))
        sampling_ops.mask_logits(logits, guard(torch.tensor([2, 0])), words)
        noise = guard(torch.rand(3, 96 - (-columns // 2048), dtype=torch.float64) + 1e-9)
        for top_k, top_p in ((0, 1.0), (1, 1.0), (0, 0.9)):
            values = (1.0, torch.float32), (top_k, torch.int64), (top_p, torch.float64), (0.1, torch.float32)
            params = [guard(torch.full((3, 1), value, dtype=dtype)) for value, dtype in values]
            sampling_ops.draw_tokens(logits, DrawParams(*params, guard(torch.rand(3, 1).double()), noise))


def main() -> None:
    side, threads = sys.argv[1:]
    room = GuardedMemory(at_end=side == "end")

    def empty(*shape: Any, dtype: torch.dtype) -> Tensor:
        return room.empty(torch.Size(shape[0] if isinstance(shape[0], Sequence) else shape), dtype)

    def empty_of(_: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return room.empty(shape, dtype)

    ops.set_threads(int(threads))
    with (
        torch.inference_mode(),
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(arena.WeightArena, "empty", empty_of),
        mock.patch.object(arena.ReusedMemory, "empty", empty_of),
    ):
        for dtype in TYPES:
            for calls in (
                products,
                blocks,
                elementwise,
                attention,
                latent_attention,
                experts,
                adapters,
                states,
                columns,
                sampling,
            ):
                calls(room.copy, dtype)
    print("whole")


if __name__ == "__main__":
    main()
