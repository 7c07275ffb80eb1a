"""Measured limits of this machine with our kernels: memory bandwidth and multiply rate."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from . import ops, quantised_weights

_WIDTH, _COLUMNS, _COPIES = 576, 49152, 4  # 226 MB of bf16, more than last caches hold
_ROWS, _INNER, _OUT = 2048, 128, 1024  # a product whose weight stays in the first two caches


def least_time(run: Callable[[], object], calls: int, budget: float = 0.6, most: int = 9) -> float:
    """Return the microseconds per call of ``run``, the minimum of up to ``most`` runs within ``budget`` seconds."""
    run()
    best, start = float("inf"), time.perf_counter()
    for _ in range(most):
        begin = time.perf_counter()
        run()
        end = time.perf_counter()
        best = min(best, end - begin)
        if end - start > budget:
            break
    return best / calls * 1e6


def reading_rate() -> float:
    """Measure weight bytes read from memory per second: products of one row with 226 MB of bf16."""
    layers = [ops.pack_linear(torch.ones(_COLUMNS, _WIDTH, dtype=torch.bfloat16)) for _ in range(_COPIES)]
    x = torch.ones(1, _WIDTH, dtype=torch.bfloat16)
    return layers[0].weight.nbytes / least_time(lambda: [ops.linear(x, layer) for layer in layers], _COPIES) * 1e6


def products_rate(dtype: torch.dtype, *, bytewise: bool = False, budget: float = 0.3) -> float:
    """Measure multiplications per second from cached operands, at the current number of threads.

    Args:
        dtype: of x, and of the weight unless ``bytewise``.
        bytewise: both are quantised to 8 bits, which a machine may multiply faster.
        budget: seconds.
    """
    weight, x = torch.randn(_OUT, _INNER).to(dtype), torch.randn(_ROWS, _INNER).to(dtype)
    layer = quantised_weights.pack_channels(weight, dynamic=True) if bytewise else ops.pack_linear(weight)
    return _ROWS * _OUT * _INNER / least_time(lambda: ops.linear(x, layer), 1, budget=budget, most=200) * 1e6
