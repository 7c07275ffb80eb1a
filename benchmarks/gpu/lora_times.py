"""Times of the low-rank op in a layer of Llama-3.1-8B, all seven modules adapted, against the bytes it must move.

What decides is a layer with what reads its products (rotation, activation, norms): expansions within these launches
must take no longer than launches of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.measure import Ceilings, Line, Machine, seconds
from rootgraft.kernels import ops
from rootgraft.kernels.lora_ops import (
    Factors,
    Segments,
    SlotTable,
    lora_add_rms_norm,
    lora_gated_activation,
    lora_rope_store_kv,
    lora_shrink_beside,
    lora_shrink_expand,
)
from rootgraft.kernels.triton.lora_config import MOST_PLACED
from rootgraft.lora.segments import make_segments

# Modules and inputs of q, k and v; of the attention's output; of gate and up; and of the MLP's output.
SHAPES = (((4096, 1024, 1024), 4096), ((4096,), 4096), ((14336, 14336), 4096), ((4096,), 14336))
TINY_SHAPES = (((64, 32, 32), 64), ((64,), 64), ((96, 96), 64), ((64,), 96))
DIM, TINY_DIM = 128, 32
PAGE = 16
CACHED = 256 << 20  # bytes of distinct factors, more than any cache of a device holds
MOST_LAYERS = 64


@dataclass(frozen=True)
class Workload:
    """A step: so many tokens for each adapter, whose ranks are these, and tokens of the base model behind them."""

    name: str
    tokens: int
    ranks: tuple[int, ...]
    base: int = 0

    @property
    def total(self) -> int:
        return self.tokens * len(self.ranks) + self.base


WORKLOADS = (
    Workload("1 token, rank 16", 1, (16,)),
    Workload("1 token, rank 64", 1, (64,)),
    Workload("32 tokens of one adapter", 32, (16,)),
    Workload("32 tokens of 8 adapters", 4, (16,) * 8),
    Workload("32 tokens of 8 adapters, ranks 8 to 64", 4, (8, 8, 8, 16, 16, 32, 32, 64)),
    Workload("64 tokens of 8 adapters", 8, (16,) * 8),
    Workload("64 tokens of 8 adapters, rank 64", 8, (64,) * 8),
    Workload("64 tokens of 32 adapters", 2, (16,) * 32),
    Workload("64 tokens of 64 adapters", 1, (16,) * 64),
    Workload("8 tokens of 8 adapters among 64", 1, (16,) * 8, base=56),
    Workload("prefill of 2048 tokens", 2048, (16,)),
    Workload("prefill of 2048 tokens, rank 64", 2048, (64,)),
    Workload("prefill of 4 x 512 tokens", 512, (16,) * 4),
)
TINY_WORKLOADS = (Workload("3 tokens of 2 adapters", 1, (4, 8), base=1),)


def run(machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    """Microseconds of a layer's low-rank part. Its floor: the factors are read once, x read, y read and written."""
    for workload in TINY_WORKLOADS if machine.tiny else WORKLOADS:
        layer = Layer(machine, workload)
        num_layers = 1 if machine.tiny else max(1, min(MOST_LAYERS, CACHED // layer.factor_bytes))
        layers = [layer, *(Layer(machine, workload) for _ in range(num_layers - 1))]
        took = seconds(machine, [each.run for each in layers])
        floor = ceilings.seconds(read=layer.factor_bytes, copied=layer.token_bytes)
        yield Line("lora", f"layer, {workload.name}", took * 1e6, "us", floor * 1e6)
        if workload.total <= MOST_PLACED:
            apart = seconds(machine, [each.read_apart for each in layers])
            joined = seconds(machine, [each.read_joined for each in layers])
            yield Line("lora", f"layer and its readers, {workload.name}", apart * 1e6, "us")
            yield Line("lora", f"layer within its readers, {workload.name}", joined * 1e6, "us")
            yield Line("lora", f"layer, {workload.name}: within against apart", joined / apart, "times")


def _segments(machine: Machine, workload: Workload) -> Segments:
    slots = np.repeat(np.arange(len(workload.ranks), dtype=np.int32), workload.tokens)
    segments = make_segments(np.concatenate([slots, np.full(workload.base, -1, np.int32)]), machine.device)
    assert segments is not None
    return segments


class Layer:
    """The adapters of a layer with its inputs and outputs.

    Attributes:
        factor_bytes: of all adapters.
        token_bytes: read and written for the adapted tokens.
    """

    def __init__(self, machine: Machine, workload: Workload) -> None:
        self._parts: list[tuple[SlotTable, Tensor, Tensor]] = []
        self._segments = _segments(machine, workload)
        self.factor_bytes = self.token_bytes = 0
        adapted = workload.tokens * len(workload.ranks)
        for sizes, width in TINY_SHAPES if machine.tiny else SHAPES:
            table = SlotTable(sizes, width, len(workload.ranks), machine.dtype, machine.device)
            for slot, rank in enumerate(workload.ranks):
                factors = _factors(machine, sizes, width, rank)
                table.put(slot, factors)
                self.factor_bytes += factors.num_bytes
            x, y = machine.randn(workload.total, width), machine.randn(workload.total, sum(sizes))
            self.token_bytes += adapted * (width + 2 * sum(sizes)) * x.element_size()
            self._parts.append((table, x, y))

        self._readers = _Readers(machine, self._parts, workload.total)

    def run(self) -> None:
        for table, x, y in self._parts:
            lora_shrink_expand(y, x, table, self._segments)

    def read_apart(self) -> None:
        """Run the low-rank op and, in launches of their own, the ops that read its results."""
        self.run()
        readers, (qkv, output, gate_up, down) = self._readers, (y for _, _, y in self._parts)
        ops.rope_store_kv(qkv, *readers.places, *readers.caches, readers.rope)
        ops.add_rms_norm(output, readers.residual, *readers.norm)
        ops.gated_activation(gate_up, "silu")
        ops.add_rms_norm(down, readers.residual, *readers.norm)

    def read_joined(self) -> None:
        """Run the same, each expansion within the op that reads it where a kernel does so."""
        readers, segments = self._readers, self._segments
        shrunk = [lora_shrink_beside(x, table, segments) for table, x, _ in self._parts]
        (qkv, x, y), *others = ((table, x, y) for table, x, y in self._parts)
        lora_rope_store_kv(y, x, *readers.places, *readers.caches, readers.rope, qkv, segments, shrunk[0])
        for (table, x, y), begun in zip(others, shrunk[1:], strict=True):
            if len(table.sizes) == 2:
                lora_gated_activation(y, x, "silu", table, segments, begun)
            else:
                lora_add_rms_norm(y, x, readers.residual, *readers.norm, table, segments, begun)


class _Readers:
    """Inputs that the ops after a layer's products need beside the products."""

    def __init__(self, machine: Machine, parts: list[tuple[SlotTable, Tensor, Tensor]], tokens: int) -> None:
        dim = TINY_DIM if machine.tiny else DIM
        q, kv, _ = parts[0][0].sizes
        hidden = parts[1][0].sizes[0]
        self.rope = ops.RopeParams(q // dim, kv // dim, machine.randn(4096, dim, dtype=torch.float32))
        positions = machine.ints(list(range(tokens)), torch.int64)
        self.places = positions, positions
        k_cache, v_cache = machine.randn(2, -(-tokens // PAGE), kv // dim, PAGE, dim)
        self.caches = k_cache, v_cache
        self.residual = machine.randn(tokens, hidden, dtype=torch.float32)
        self.norm = machine.randn(hidden), 1e-5, 0.0


def _factors(machine: Machine, sizes: tuple[int, ...], width: int, rank: int) -> Factors:
    total = rank * len(sizes)
    scale = torch.full((total,), 1e-3, device=machine.device)
    return Factors(machine.randn(total, width), scale, (rank,) * len(sizes), machine.randn(rank * sum(sizes)))
