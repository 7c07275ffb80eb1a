"""Times of the low-rank op in a layer of Llama-3.1-8B, all seven modules adapted, against the bytes it must move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.measure import Ceilings, Line, Machine, seconds
from rootgraft.kernels.lora_ops import Factors, Segments, SlotTable, lora_shrink_expand
from rootgraft.lora.segments import make_segments

SHAPES = (((4096, 1024, 1024), 4096), ((4096,), 4096), ((14336, 14336), 4096), ((4096,), 14336))
TINY_SHAPES = (((64, 64), 64), ((64,), 128))
_CACHED = 256 << 20  # bytes of distinct factors, more than any cache of a device holds
_MOST_LAYERS = 64


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
        num_layers = 1 if machine.tiny else max(1, min(_MOST_LAYERS, _CACHED // layer.factor_bytes))
        layers = [layer, *(Layer(machine, workload) for _ in range(num_layers - 1))]
        took = seconds(machine, [each.run for each in layers])
        floor = ceilings.seconds(read=layer.factor_bytes, copied=layer.token_bytes)
        yield Line("lora", f"layer, {workload.name}", took * 1e6, "us", floor * 1e6)


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

    def run(self) -> None:
        for table, x, y in self._parts:
            lora_shrink_expand(y, x, table, self._segments)


def _factors(machine: Machine, sizes: tuple[int, ...], width: int, rank: int) -> Factors:
    total = rank * len(sizes)
    scale = torch.full((total,), 1e-3, device=machine.device)
    return Factors(machine.randn(total, width), scale, (rank,) * len(sizes), machine.randn(rank * sum(sizes)))
