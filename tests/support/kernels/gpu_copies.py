"""The GPU's kernels on a GPU, for tests whose tensors are on the CPU: each launch gets copies, and gives them back.

So the tests that run in Triton's interpreter everywhere run compiled where there is a GPU, by the same definitions:

    ROOTGRAFT_TEST_GPU=1 pytest tests/kernels/test_triton_*.py tests/scenarios/models/test_models_on_gpu_kernels.py
"""

from __future__ import annotations

import ctypes
import dataclasses

import torch
from torch import Tensor

from rootgraft.kernels.triton.launch import Launch
from support.kernels import triton_interpreter

_run = Launch.run


def install() -> None:
    """Have every launch of this process run with copies on the GPU."""
    Launch.run = run


def run(launch: Launch, device: str = "cuda") -> None:
    """Launch with copies of all tensors on the device, and copy what it wrote back."""
    copies = Copies(device)
    args = tuple(copies.of(each) if isinstance(each, Tensor) else each for each in launch.args)
    _run(dataclasses.replace(launch, args=args))
    copies.give_back()


class Copies:
    """Memory of the CPU on a device, each storage once: views of the same memory stay such.

    Tensors that kernels reach by address (``triton_interpreter.allow``) are copied too, and int64 numbers that are
    addresses in them become those of the copies.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._storages: dict[int, tuple[Tensor, Tensor]] = {}  # bytes on the CPU and on the device
        self._reachable = [
            (begin, end, _bytes_at(begin, end).to(device, copy=True)) for begin, end in triton_interpreter.allowed()
        ]
        if self._device.type == "cpu":  # of tests of these copies: the interpreter asks what a kernel may reach
            triton_interpreter.allow(*(copy for _, _, copy in self._reachable))

    def of(self, tensor: Tensor) -> Tensor:
        """A tensor's copy, at the same place of its storage."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._storages:
            original = torch.empty(0, dtype=torch.uint8).set_(storage)
            copy = torch.empty_like(original, device=self._device).copy_(original)
            self._storages[storage.data_ptr()] = original, copy
        original, copy = self._storages[storage.data_ptr()]
        view = torch.empty(0, dtype=tensor.dtype, device=self._device)
        view.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.dtype is torch.int64 and self._translate(view):
            self._storages[storage.data_ptr()] = copy, copy  # which no kernel writes
        return view

    def _translate(self, numbers: Tensor) -> bool:
        """Replace addresses by those of the copies. Returns whether there were any."""
        found = torch.zeros_like(numbers, dtype=torch.bool)
        for begin, end, copy in self._reachable:
            inside = (numbers >= begin) & (numbers < end) & ~found
            numbers += inside * (copy.data_ptr() - begin)
            found |= inside
        return bool(found.any())

    def give_back(self) -> None:
        """Copy all back to the CPU's memory."""
        for original, copy in self._storages.values():
            original.copy_(copy)


def _bytes_at(begin: int, end: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * (end - begin)).from_address(begin), dtype=torch.uint8)
