"""Launch of a Triton kernel: run it, or compile it for a device that is not present."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NARROW_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TYPES = {**NARROW_TYPES, "fp32": torch.float32}
ALIGNMENT = 16  # bytes; Triton compiles another kernel if an address or a number is not a multiple of 16
_NARROW = frozenset(NARROW_TYPES.values())
_INTERPRETED_SMS = 4  # multiprocessors of the interpreted device: few, so that small tests cover both ways to split

DEVICE_TYPES = frozenset(("cuda",))
"""Types of devices that the kernels serve. Tests and dry runs in Triton's interpreter put another set in its place."""


LEAST_CAPABILITY = (8, 0)
"""Compute capability from which on kernels run: products of bfloat16 on tensor cores, and copies to shared memory that
a pipeline does not wait for. What is compiled for older GPUs multiplies on ordinary cores and spills registers."""

_REGISTER_SHARED = 200 << 10

OFFLINE_SHARED = 166_912
"""Bytes of shared memory that a program may have on a device that is not there. ``triton_offline`` puts others here."""


def serves(device: torch.device) -> bool:
    return device.type in DEVICE_TYPES and (device.type != "cuda" or is_capable(device))


def is_capable(device: torch.device) -> bool:
    """Return whether a CUDA device has the features that kernels need."""
    return _capability(device.index or 0) >= LEAST_CAPABILITY


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use, for the choice of tiles."""
    return _shared_bytes(device.index or 0) if device.type == "cuda" else OFFLINE_SHARED


def multiplies_registers(device: torch.device) -> bool:
    """Return whether tensor cores take both operands from registers: on sm_80, 86, 89 and 120, told by shared memory.

    There, tiles that fit the registers of other GPUs may spill.
    """
    return shared_bytes(device) < _REGISTER_SHARED


@functools.cache
def _shared_bytes(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def is_placed(*tensors: Tensor) -> bool:
    """Return whether kernels can address these tensors: on an enabled device, contiguous and aligned."""
    return all(
        serves(tensor.device) and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors
    )


def is_of(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Return whether kernels can address these tensors (``is_placed``) and all of them have the type ``dtype``.

    It is meant for tensors whose type is independent of the model's, such as logits and the residual stream in fp32.
    """
    return is_placed(*tensors) and all(tensor.dtype is dtype for tensor in tensors)


def is_narrow(*tensors: Tensor) -> bool:
    """Return whether kernels support these tensors of a model: ``is_placed`` and ``is_model_type``."""
    return is_placed(*tensors) and all(is_model_type(tensor.dtype, on_gpu=tensor.is_cuda) for tensor in tensors)


def is_model_type(dtype: torch.dtype, *, on_gpu: bool) -> bool:
    """Return whether kernels support models of this type: fp16 and bf16.

    The interpreter also supports fp32, for tests. A model in fp32 on a GPU runs in unmodified torch, as a reference.
    """
    return dtype in _NARROW or (dtype is torch.float32 and not on_gpu)


def num_sms(device: torch.device) -> int:
    """Return the number of the device's multiprocessors, for the choice of grids."""
    return _num_sms(device.index or 0) if device.type == "cuda" else _INTERPRETED_SMS


@functools.cache
def _num_sms(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int, low: int = 1) -> int:
    """Return the least power of two that is at least n and ``low``, a power of two."""
    return max(low, 1 << (n - 1).bit_length())


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor without memory, for a ``Launch`` that is only compiled."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: a ``triton.jit`` function.
        grid: number of programs along x, y and z; a grid with a 0 is not launched.
        args: tensors and numbers, in the kernel's order.
        constants: the kernel's ``tl.constexpr`` arguments by name.
        num_warps: number of warps of a program.
        num_stages: number of stages of software pipelines.
    """

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def run(self) -> None:
        """Start the kernel on the current stream of the tensors' device."""
        if 0 not in self.grid:
            self.kernel[self.grid](*self.args, **self._options())

    def compile(self) -> Any:
        """Compile this launch for the target of Triton's active driver."""
        return self.kernel.warmup(*self.args, grid=self.grid, **self._options())

    def _options(self) -> dict[str, Any]:
        return {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages}
