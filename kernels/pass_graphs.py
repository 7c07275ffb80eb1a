"""Whole passes of ``kernels.ops`` to repeat in later steps: recorded on a CPU, captured in a CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .backend import native_kernels, on_triton
from .cpu import recorded_pass
from .cpu.native_library import Buffers
from .cpu.recorded_pass import RecordedPass

__all__ = ["Buffers", "Capture", "RecordedPass", "capture_for", "record"]

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs and captures a pass; returns the function that replays it."""


def record(forward: Callable[[], Tensor], buffers: Buffers) -> tuple[Tensor, RecordedPass | None]:
    """Run a forward pass of these ops, and record it for later steps with any number of tokens and rows.

    The tensors that ``forward`` reads must stay alive and in place as long as the recorded pass, with room for the
    tokens and rows of later steps. Torch ops other than allocations are not allowed, each op must process all tokens,
    and control flow must not depend on the contents of tensors or on the numbers of tokens and rows.

    Args:
        forward: the pass.
        buffers: memory of the ops' results, which several recordings may share.

    Returns:
        The result of the pass, which each ``RecordedPass.replay`` overwrites; and the recorded pass, or None if a part
        of it runs in plain torch.
    """
    kernels = native_kernels()
    return (forward(), None) if kernels is None else recorded_pass.record(kernels.library, forward, buffers)


def capture_for(k_cache: Tensor, value_dim: int | None = None) -> Capture | None:
    """Return a CUDA graph capture for passes over a layer's KV cache; None if an op reads back to the host.

    Args:
        value_dim: see ``AttentionParams``.
    """
    if not (k_cache.is_cuda and on_triton(k_cache.device)):
        return None
    from .triton import attention as gpu
    from .triton import graph_capture

    q = k_cache.new_empty(0, 1, k_cache.shape[3])
    table = torch.empty(0, 1, dtype=torch.int32, device=k_cache.device)
    takes = gpu.takes(q, k_cache, k_cache, table, value_dim)
    return graph_capture.Capture(k_cache.device) if takes else None
