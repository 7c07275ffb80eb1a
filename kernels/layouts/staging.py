"""Asynchronous copies between host and device through pinned memory.

For a copy from pageable memory the driver may make the host wait. So values are first copied to pinned memory, which
torch does not reuse until the device has read it. Each copy has its own pinned memory, so any number of steps may be in
flight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device. On a CPU the tensor may share the array's memory."""
    return _staged(values, device).to(device, non_blocking=True)


def refill(target: Tensor, values: NDArray[Any]) -> None:
    """Overwrite ``target`` in place with values of its shape and type."""
    target.copy_(_staged(values, target.device), non_blocking=True)


class HostCopy:
    """Asynchronous copy of a tensor to the host.

    Args:
        tensor: tensor on any device; the host must not change it until the copy has ended.
    """

    __slots__ = ("_done", "_values")

    def __init__(self, tensor: Tensor) -> None:
        self._values, self._done = tensor, None
        if tensor.device.type == "cuda":
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """Wait for the copy, not for later work of the device, and return the values."""
        if self._done is not None:
            self._done.synchronize()
        return self._values


def _staged(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return the values in a host tensor that the device can read asynchronously."""
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(values))
    tensor = torch.empty(values.shape, dtype=torch.from_numpy(values[:0]).dtype, pin_memory=True)
    tensor.numpy()[...] = values
    return tensor
