"""Measured limits of this machine with our kernels: memory bandwidth and multiply rate."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import torch

from . import ops, quantised_weights
from .layouts.packed_weights import Linear

_WIDTH, _COLUMNS, _COPIES = 576, 49152, 4  # 226 MB in bf16; more if the last-level cache holds that much.
_SHIFTS = {"K": 10, "M": 20, "G": 30}
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CHUNK = 512  # Rows of a chunk of a prompt.
_ROWS, _INNER, _OUT = 2048, 128, 1024  # The weight of this product fits in the first two caches.


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


def last_cache_size(caches: Path = _CACHES) -> int:
    """Return the size in bytes of the largest cache that Linux reports; 0 if it reports none."""
    sizes = [0]
    for file in caches.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            number = file.read_text().strip()
            sizes.append(int(number.rstrip("KMG")) << _SHIFTS.get(number[-1:], 0))
    return max(sizes)


def reading_rate() -> float:
    """Measure the weight bytes read from memory per second: products of one row, with weights twice the last cache."""
    weight = torch.ones(_COLUMNS, _WIDTH, dtype=torch.bfloat16)
    copies = max(_COPIES, -(-2 * last_cache_size() // weight.nbytes))
    layers = [ops.pack_linear(weight) for _ in range(copies)]
    x = torch.ones(1, _WIDTH, dtype=torch.bfloat16)
    return layers[0].weight.nbytes / least_time(lambda: [ops.linear(x, layer) for layer in layers], copies) * 1e6


def products_rate(dtype: torch.dtype, *, bytewise: bool = False, budget: float = 0.3) -> float:
    """Measure multiplications per second with cached operands, at the current number of threads.

    Args:
        dtype: type of x, and of the weight unless ``bytewise``.
        bytewise: whether both are quantised to 8 bits, which a machine may multiply faster.
        budget: time for the measurement in seconds.
    """
    weight, x = torch.randn(_OUT, _INNER).to(dtype), torch.randn(_ROWS, _INNER).to(dtype)
    layer = quantised_weights.pack_channels(weight, dynamic=True) if bytewise else ops.pack_linear(weight)
    return _ROWS * _OUT * _INNER / least_time(lambda: ops.linear(x, layer), 1, budget=budget, most=200) * 1e6


def layer_rate(layer: Linear, dtype: torch.dtype, *, budget: float = 0.3) -> float:
    """Measure multiplications per second of a layer with the rows of a prompt's chunk, repeated.

    Args:
        layer: the layer, in any form. A value of it times a value of x counts as one multiplication, however many
            instructions it takes.
        dtype: type of x.
        budget: time for the measurement in seconds.
    """
    x = torch.randn(_CHUNK, layer.in_features).to(dtype)
    seconds = least_time(lambda: ops.linear(x, layer), 1, budget=budget, most=200) / 1e6
    return _CHUNK * layer.out_features * layer.in_features / seconds
