"""Copies between the host and a device for which nobody waits.

A GPU reads memory that the operating system may move only by way of the driver, which can make the host wait. So
values are first put where they cannot be moved; torch keeps that memory until the device has read it. Every copy has
memory of its own, so any number of steps may be under way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """The values on the device. On a CPU they may be the array's own memory."""
    return _staged(values, device).to(device, non_blocking=True)


def refill(target: Tensor, values: NDArray[Any]) -> None:
    """Write values of its shape and type to ``target``, which stays where it is."""
    target.copy_(_staged(values, target.device), non_blocking=True)


class HostCopy:
    """A copy of a tensor to the host, under way.

    Args:
        tensor: any, on any device; not to be changed by what the host does.
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
        """The values, once they are there. What the device was given after them is not waited for."""
        if self._done is not None:
            self._done.synchronize()
        return self._values


def _staged(values: NDArray[Any], device: torch.device) -> Tensor:
    """The values as a tensor of the host that this device may read while the host goes on."""
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(values))
    tensor = torch.empty(values.shape, dtype=torch.from_numpy(values[:0]).dtype, pin_memory=True)
    tensor.numpy()[...] = values
    return tensor
