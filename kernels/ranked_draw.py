"""A draw among the kept tokens of each row, where the device has a kernel for it: the face of ``sampling_draw``."""

from __future__ import annotations

from torch import Tensor

from . import ops
from .triton import launch


def has_kernel(logits: Tensor) -> bool:
    """Whether ``draw_ranked`` computes for these logits [n, V]."""
    return ops.on_triton(logits.device) and launch.is_known(logits)


def draw_ranked(logits: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """Draw one of the tokens that all filters keep, as ``engine.sampling.top_k_top_p`` defines it.

    The host does not wait for the device.

    Equal logits of a row must have equal probabilities, and larger ones no smaller.

    Args:
        logits: [n, V] float32, contiguous.
        probs: [n, V] float32, the softmax after temperature.
        top_k: [n, 1] int64, 0 is off.
        top_p: [n, 1] float64, 1 is off.
        min_p: [n, 1] float32, 0 is off.
        u: [n, 1] float64 in [0, 1), the random number that decides.

    Returns: [n] int64; 0 for rows whose probabilities are NaN.
    """
    from .triton import sampling_draw

    return sampling_draw.draw_ranked(logits, probs, top_k, top_p, min_p, u)
