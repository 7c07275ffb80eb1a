"""The ceilings against which all else is held: copy and read bandwidth, and a matrix product."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.measure import Ceilings, Line, Machine, seconds


def measure(machine: Machine) -> Ceilings:
    """Copy, read and matrix product at sizes where the device is at its best. Numbers are random, not zeros."""
    count = 1 << (12 if machine.tiny else 28)
    source = machine.randn(count, dtype=torch.float32)
    narrow = source.to(machine.dtype)
    target = torch.empty_like(source)
    num_bytes = source.numel() * source.element_size()
    copy = 2 * num_bytes / seconds(machine, [lambda: target.copy_(source)])
    read = max(each.nbytes / seconds(machine, [partial(torch.sum, each)]) for each in (source, narrow))
    size = 64 if machine.tiny else 8192
    a, b = machine.randn(size, size), machine.randn(size, size)
    flops = 2 * size**3 / seconds(machine, [lambda: a @ b])
    # A copy is a read as well: where the sums are the slower kernels, it is not the memory that limits them.
    return Ceilings(copy, max(read, copy), flops)


def lines(ceilings: Ceilings) -> list[Line]:
    """The ceilings as results."""
    return [
        Line("ceilings", "copy", ceilings.copy / 1e9, "GB/s"),
        Line("ceilings", "read", ceilings.read / 1e9, "GB/s"),
        Line("ceilings", "matrix product", ceilings.flops / 1e12, "TFLOP/s"),
    ]
