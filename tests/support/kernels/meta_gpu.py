"""A GPU of meta tensors: which kernels a call would launch, on types and shapes alone.

Tensors on torch's device without memory say that they are on CUDA, and launches are noted, not run. Values are missing,
so what would read one back raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from rootgraft.kernels.triton import launch

GPU = torch.device("meta")


@contextmanager
def posing_gpu() -> Iterator[list[str]]:
    """Let meta tensors pose as CUDA tensors; yields the names of the kernels launched since, in order."""
    launched: list[str] = []

    def note(self: launch.Launch) -> None:
        if 0 not in self.grid:
            launched.append(self.kernel.__name__)

    with (
        mock.patch.object(launch, "DEVICE_TYPES", frozenset((GPU.type,))),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type == GPU.type)),
        mock.patch.object(torch, "mm", wide_mm(torch.mm)),
        mock.patch.object(launch.Launch, "run", note),
        torch.inference_mode(),
    ):
        yield launched


def wide_mm(mm: Any) -> Any:
    """``torch.mm`` whose ``out_dtype``, which only CUDA computes, gives the shape and type alone."""

    def wrapped(x: torch.Tensor, y: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return mm(x, y) if out_dtype is None else mm(x, y).to(out_dtype)

    return wrapped


def gpu_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=GPU)
