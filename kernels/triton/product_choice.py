"""Products of few rows by the fastest of several methods, measured on the device for each shape before capture.

A step of few rows reads every weight once, so its time is at best that of reading them from memory. Each of cuBLAS,
cublasLt and our own kernel is the fastest for some shapes. They are measured when a pass is run before its capture, so
nothing is measured during serving. Shapes that were not measured use torch. A model on several devices uses torch for
all shapes: every rank computes some products as a whole, such as the product that picks experts, and ranks that choose
separately could get different bits for it.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from . import invariant_linear
from .launch import is_model_type

MOST_ROWS = 64
"""Rows from which on arithmetic, not reading the weight, takes the time: cuBLAS is at its best there."""

_GAIN = 0.97  # part of the time of torch's choice below which another method is used: smaller gains are noise
_REPEATS = 7
_FLUSHED = 128 << 20  # bytes written between two runs, more than the device's caches hold
_FLUSHES = 8  # number of such writes: they take longer than the host's launch of a method, so no gap is measured

Way = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A product of x [T, K] with a weight [N, K] and a bias [N] or None, to the type of x."""


class _Shape(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    rows: int
    columns: int
    width: int
    is_biased: bool


def by_cublaslt(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by cublasLt, regardless of torch's preference."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return functional.linear(x, weight, bias)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


WAYS: dict[str, Way] = {
    "torch": functional.linear,
    "cublaslt": by_cublaslt,
    "few rows": invariant_linear.few_row_linear,
}
"""The first one is what all are compared with, in time and in result."""

CHOSEN: dict[_Shape, Way] = {}
"""The way of each shape that was measured, as long as the process lives."""

_thread = threading.local()


@contextmanager
def measuring() -> Iterator[None]:
    """Measure the methods for each new product inside the block, in a process without other ranks."""
    _thread.measures = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    try:
        yield
    finally:
        _thread.measures = False


def is_measuring() -> bool:
    """Return whether this thread is measuring; another thread may be capturing, which allows no measurement."""
    return getattr(_thread, "measures", False)


def way_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Way:
    """Return the method to multiply x [T, K] with a weight [N, K] of its type on a supported device."""
    if len(x) > MOST_ROWS or not is_model_type(x.dtype, on_gpu=x.is_cuda) or not invariant_linear.takes(x, weight):
        return functional.linear
    shape = _Shape(x.device, x.dtype, len(x), weight.shape[0], weight.shape[1], bias is not None)
    way = CHOSEN.get(shape)
    if way is None:
        if not is_measuring():
            return functional.linear
        way = CHOSEN[shape] = WAYS[fastest(x, weight, bias)]
    return way


def fastest(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Return the name of the fastest correct method; torch's if no other one is clearly faster."""
    names = list(WAYS)
    try:
        probe = torch.randn_like(x)  # x of a pass before its capture may be all zeros, which check nothing
        times = {name: seconds(way, probe, weight, bias) for name, way in WAYS.items() if _is_right(way, probe, weight)}
    except torch.OutOfMemoryError:
        return names[0]
    finally:
        if x.is_cuda:
            torch.cuda.empty_cache()  # memory of the measurement must not count as memory that steps need
    best = min(times, key=times.__getitem__, default=names[0])
    return best if times.get(best, 0.0) < _GAIN * times.get(names[0], 0.0) else names[0]


def _is_right(way: Way, x: Tensor, weight: Tensor) -> bool:
    """Return whether a method gives the product; a method that this build of torch or this GPU lacks does not."""
    expected = functional.linear(x, weight).float()
    try:
        error = (way(x, weight, None).float() - expected).abs().max()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return bool(error <= 0.02 * expected.abs().max())


def seconds(way: Way, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """Return the median time of a product whose weight is in no cache of the device."""
    flushed = torch.empty(_FLUSHED, dtype=torch.uint8, device=x.device)
    times: list[float] = []
    for _ in range(_REPEATS):
        for _ in range(_FLUSHES):
            flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        way(x, weight, bias)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
