"""Ops with a recurrent state on the device: against plain torch in float64's place, and their times against floors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.measure import Ceilings, Line, Machine, seconds
from rootgraft.kernels import state_ops, state_reference
from rootgraft.kernels.state_ops import ConvParams, DeltaParams, GatedNormParams, SsmParams, StateBatch

# Of a result that is rounded once, and of sums in which one factor has 16 bits.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Mixer:
    """A layer's sizes: of the state space of Nemotron-H 8B, and of the delta net of Qwen3-Next."""

    heads: int = 128
    dim: int = 64
    groups: int = 8
    size: int = 128
    is_delta: bool = False


MIXERS = {"state space": Mixer(), "delta net": Mixer(32, 128, 16, 128, is_delta=True)}
TINY = {"state space": Mixer(2, 16, 1, 16), "delta net": Mixer(2, 16, 1, 16, is_delta=True)}
Call = Callable[[], Tensor]


def check(machine: Machine) -> Iterator[Line]:
    """Largest difference of results and states from plain torch's, as a share of what is tolerated."""
    lengths = [1, 40] if machine.tiny else [1, 3, 8, 200, 33, 1]
    for dtype in [torch.float32] if machine.tiny else [torch.bfloat16, torch.float16]:
        for name, mixer in (TINY if machine.tiny else MIXERS).items():
            layer = Layer(machine, mixer, lengths, dtype)
            for op in ("conv", "scan", "norm"):
                ours, theirs = layer.run(op, state_ops), layer.run(op, state_reference)
                error = max(_error(*pair) for pair in zip(ours, theirs, strict=True)) / TOLERANCE[dtype]
                yield Line(
                    "correctness", f"{op} of a {name} {str(dtype).removeprefix('torch.')}", error, "of tolerance"
                )


def run(machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    """Microseconds of a layer's ops. The floor is to read inputs, states and results once, and to write the latter."""
    shapes = {"decode, 2 rows": [1] * 2, "a prompt of 12": [12]}
    if not machine.tiny:
        shapes = {f"decode, {rows} rows": [1] * rows for rows in (1, 64, 256)}
        shapes |= {f"a prompt of {tokens}": [tokens] for tokens in (128, 2048)}
    for name, mixer in (TINY if machine.tiny else MIXERS).items():
        for shape, lengths in shapes.items():
            layer = Layer(machine, mixer, lengths, machine.dtype)
            for op in ("conv", "scan", "norm"):
                took = seconds(machine, [layer.call(op, state_ops)])
                floor = ceilings.seconds(copied=2 * layer.bytes_of(op))
                yield Line("states", f"{op} of a {name}, {shape}", took * 1e6, "us", floor * 1e6)


class Layer:
    """A layer's inputs and states, for rows of these lengths. Each row reads its own slot."""

    def __init__(self, machine: Machine, mixer: Mixer, lengths: list[int], dtype: torch.dtype) -> None:
        self.mixer, rows, tokens = mixer, len(lengths), sum(lengths)
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        slots = machine.ints(list(range(rows)))
        kept = machine.ints([rows if token == tokens // 2 else -1 for token in range(tokens)])
        self.batch = StateBatch(machine.ints(starts), slots, slots, kept, max(lengths))
        heads, width = mixer.heads, mixer.heads * mixer.dim
        columns = width + 2 * mixer.groups * mixer.size
        decay, bias, skip = (torch.rand(heads, device=machine.device) for _ in range(3))
        self.scan: DeltaParams | SsmParams = (
            DeltaParams(heads, mixer.dim, mixer.groups, mixer.size, -decay, bias)
            if mixer.is_delta
            else SsmParams(heads, mixer.dim, mixer.groups, mixer.size, -decay, bias, skip)
        )
        self.conv = ConvParams(machine.randn(4, columns, dtype=dtype), None, False)
        groups = heads if mixer.is_delta else mixer.groups
        self.norm = GatedNormParams(machine.randn(width, dtype=dtype), 1e-5, groups, mixer.is_delta)
        self.x, self.gates = machine.randn(tokens, columns, dtype=dtype), machine.randn(tokens, 2 * heads, dtype=dtype)
        self.y, self.gate = machine.randn(tokens, width, dtype=dtype), machine.randn(tokens, width, dtype=dtype)
        self.inputs = machine.randn(rows + 2, 3, columns, dtype=dtype)
        self.sums = machine.randn(rows + 2, heads, mixer.size, mixer.dim, dtype=torch.float32)

    def call(self, op: str, ops: object) -> Call:
        """Return a call of an op of a module, which leaves its states in the pool."""
        conv, scan, delta, norm = (
            getattr(ops, name) for name in ("causal_conv", "ssm_scan", "delta_scan", "gated_norm")
        )
        if op == "conv":
            return lambda: conv(self.x, self.inputs, self.batch, self.conv)
        if op == "norm":
            return lambda: norm(self.y, self.gate, self.norm)
        if self.mixer.is_delta:
            return lambda: delta(self.x, self.gates, (self.mixer.heads, 0), self.sums, self.batch, self.scan)
        return lambda: scan(self.x, self.gates, 0, self.sums, self.batch, self.scan)

    def run(self, op: str, ops: object) -> tuple[Tensor, ...]:
        """Return the result and the states after an op, whose own states stay as they are."""
        held = self.inputs, self.sums
        self.inputs, self.sums = (each.clone() for each in held)
        result = self.call(op, ops)(), self.inputs[:-1], self.sums[:-1]
        self.inputs, self.sums = held
        return result

    def bytes_of(self, op: str) -> int:
        """Half of the bytes that an op reads and writes."""
        rows = len(self.batch.source)
        if op == "conv":
            return self.x.nbytes + rows * self.inputs[0].nbytes
        return self.y.nbytes + (rows * self.sums[0].nbytes if op == "scan" else 0)


def _error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative where numbers are large. Infinite where a number is missing."""
    difference = (ours.double() - theirs.double()).abs() / theirs.double().abs().clamp(min=1.0)
    return float(difference.nan_to_num(nan=float("inf")).max())
