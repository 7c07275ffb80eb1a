"""Copies of weights to a device, through two buffers of pinned memory: one is filled while the device reads the other.

For a copy directly from the pages of a mapped file, the driver would copy them once more and make the host wait.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_PIECE = 32 << 20  # bytes of a buffer


class PinnedBuffers:
    """Two buffers of pinned host memory, which are filled in turn while the GPU reads the other one. For one thread.

    Args:
        device: a CUDA device.
        num_bytes: size of each buffer.
    """

    def __init__(self, device: torch.device, num_bytes: int = _PIECE) -> None:
        self._device, self._num_bytes, self._turn = device, num_bytes, 0
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._read = [torch.cuda.Event() for _ in range(2)]

    def fill(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor of the host into a contiguous one of the device, of the same shape, converting it to its dtype.

        When this returns, ``source`` may change: all its numbers are in a buffer or on the device. Work that is
        launched later on the device's current stream sees the copied numbers.
        """
        into, numbers = target.view(-1), source.reshape(-1)
        step = self._num_bytes // target.element_size()
        for first in range(0, len(into), step):
            piece = numbers[first : first + step]
            turn, self._turn = self._turn, 1 - self._turn
            self._read[turn].synchronize()
            staged = self._buffers[turn][: len(piece) * target.element_size()].view(target.dtype)
            staged.copy_(piece)
            into[first : first + step].copy_(staged, non_blocking=True)
            self._read[turn].record(torch.cuda.current_stream(self._device))


@cache
def _buffers(device: torch.device) -> PinnedBuffers:
    return PinnedBuffers(device)


def upload(target: Tensor, source: Tensor) -> None:
    """Write numbers of the host into a tensor of the same shape, in its type and on its device."""
    if target.device.type == "cuda" and source.device.type == "cpu" and target.is_contiguous():
        _buffers(target.device).fill(target, source)
    else:
        target.copy_(source)


def end_uploads() -> None:
    """Free the buffers, once the weights are loaded."""
    _buffers.cache_clear()
