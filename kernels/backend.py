"""Which kernels serve: the native ones of the CPU, Triton's, or plain torch; asked by every op, told at the start."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util

import torch
from torch import Tensor

from .cpu import thread_count
from .cpu.build import BuildError, default_cache, load_library
from .cpu.native_ops import Kernels
from .triton import launch

_native_enabled = True


def use_native(enabled: bool) -> None:
    """Allows or forbids the kernels of CPU and GPU from now on (allowed at first); plain torch serves without.

    Weights packed by ``pack_linear`` stay as they were packed, and run accordingly.
    """
    global _native_enabled
    _native_enabled = enabled


def native_status() -> str:
    """One line on the CPU kernels: what they were built for, or why plain torch serves. Builds them if need be."""
    if not _native_enabled:
        return "CPU kernels: plain torch, native kernels are turned off"
    kernels = load()
    if isinstance(kernels, BuildError):
        return f"CPU kernels: plain torch, because {kernels}"
    return f"CPU kernels: native, {kernels.instruction_set}, {thread_count.count()} threads"


def triton_status() -> str:
    """One line on the GPU kernels: which compiler makes them, or why plain torch serves."""
    if not _native_enabled:
        return "GPU kernels: plain torch, kernels are turned off"
    if not _has_triton():
        return "GPU kernels: plain torch, because Triton is not installed"
    return f"GPU kernels: Triton {importlib.metadata.version('triton')}, but plain torch for float32"


def set_threads(count: int) -> None:
    """Sets the number of threads of the CPU ops.

    Where the native kernels are, torch's own ops, few and small beside them, get one thread: torch's pool spins for a
    while after each of its ops, on the cores that the kernels' pool needs.
    """
    thread_count.set_count(count)
    torch.set_num_threads(count if native_kernels() is None else 1)


@functools.cache
def load() -> Kernels | BuildError:
    """The native kernels of this machine, built where they are not yet, or why there are none."""
    try:
        return Kernels(load_library(default_cache()))
    except BuildError as error:
        return error


def native_kernels() -> Kernels | None:
    """The native kernels, where they are allowed and could be built."""
    if not _native_enabled:
        return None
    kernels = load()
    return None if isinstance(kernels, BuildError) else kernels


def native_for(first: Tensor, *others: Tensor) -> Kernels | None:
    """The native kernels, where they take these tensors."""
    kernels = native_kernels() if first.is_cpu else None
    return kernels if kernels is not None and kernels.takes(first, *others) else None


def native_for_kv(x: Tensor, k_cache: Tensor, v_cache: Tensor) -> Kernels | None:
    """The native kernels, where they take queries, or what they are made from, with these caches."""
    kernels = native_kernels() if x.is_cpu else None
    return kernels if kernels is not None and kernels.takes_kv(x, k_cache, v_cache) else None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def on_triton(device: torch.device) -> bool:
    """Whether the GPU kernels are for this device, allowed, and can be compiled."""
    return launch.serves(device) and _native_enabled and _has_triton()
