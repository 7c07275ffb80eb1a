"""Whole passes of ``kernels.ops`` to repeat in later steps: recorded on a CPU, captured in a CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .backend import native_kernels, on_triton
from .cpu import recorded_pass
from .cpu.native_library import Buffers
from .cpu.recorded_pass import RecordedPass
from .layouts import kv_forms

__all__ = ["Buffers", "Capture", "RecordedPass", "capture_for", "host_wait", "record"]

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


def capture_for(caches: Sequence[Tensor], dtype: torch.dtype, value_dim: int | None = None) -> Capture | None:
    """Return a CUDA graph capture for passes over KV caches; None if attention over one of them reads back to the host.

    Args:
        caches: a layer's keys for each shape of K and V that layers have, in the model's type or in 8 bits.
        dtype: the model's type.
        value_dim: see ``AttentionParams``.
    """
    device = caches[0].device
    if not (caches[0].is_cuda and on_triton(device)):
        return None
    from .triton import attention as gpu
    from .triton import graph_capture

    table = torch.empty(0, 1, dtype=torch.int32, device=device)
    queries = (cache.new_empty(0, 1, kv_forms.head_dim(cache), dtype=dtype) for cache in caches)
    takes = all(gpu.takes(q, cache, cache, table, value_dim) for q, cache in zip(queries, caches, strict=True))
    return graph_capture.Capture(device) if takes else None


def host_wait(forward: Callable[[], object]) -> str | None:
    """Run a pass on a GPU, up to the first op for which the host would wait: such a pass cannot be captured.

    Returns:
        The name of the op; None if there is none.
    """
    from .triton import host_waits

    return host_waits.host_wait(forward)
