"""Choice of the kernels that compute an op: native CPU kernels, Triton kernels, or plain torch."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import Tensor

from .cpu.build import BuildError, default_cache
from .cpu.native_library import Listener, NativeLibrary
from .cpu.native_ops import Kernels
from .cpu.portable_build import load_best
from .triton import launch


class KernelLibrary:
    """The kernels of this process, which are the only state of this package.

    Attributes:
        enabled: whether native and Triton kernels may run; otherwise plain torch computes.
        invariant: whether on a GPU the bits of a token must not depend on the other tokens of a step.
    """

    def __init__(self) -> None:
        self.enabled = True
        self.invariant = False

    @functools.cached_property
    def native(self) -> Kernels | BuildError:
        """The CPU kernels, compiled and loaded on first use; or the error that says why they are not available."""
        try:
            return Kernels(NativeLibrary(load_best(default_cache())))
        except BuildError as error:
            return error


LIBRARY: Final = KernelLibrary()


def use_native(enabled: bool) -> None:
    """Enable or disable the kernels for CPU and GPU.

    Weights that ``pack_linear`` has packed already keep their layout and the kernels that read it.
    """
    LIBRARY.enabled = enabled


def use_invariant(invariant: bool) -> None:
    """Select, on a GPU, the kernels whose results for a token do not depend on the other tokens, or the faster ones.

    On a CPU the native kernels always have this property.
    """
    LIBRARY.invariant = invariant


def is_invariant(device: torch.device) -> bool:
    """Return whether the batch-invariant kernels are selected on this GPU."""
    return LIBRARY.invariant and on_triton(device)


def native_kernels() -> Kernels | None:
    """Return the CPU kernels; None if they are disabled or could not be built."""
    if not LIBRARY.enabled:
        return None
    kernels = LIBRARY.native
    return None if isinstance(kernels, BuildError) else kernels


def packing_kernels() -> Kernels:
    """Return the CPU kernels that have packed a weight. They read it even if kernels were disabled afterwards."""
    kernels = LIBRARY.native
    assert not isinstance(kernels, BuildError)
    return kernels


def native_status() -> str:
    """Return one line on the CPU kernels: their instruction set, or why plain torch computes. May build them."""
    if not LIBRARY.enabled:
        return "CPU kernels: plain torch, because native kernels are turned off"
    kernels = LIBRARY.native
    if isinstance(kernels, BuildError):
        return f"CPU kernels: plain torch, because {kernels}"
    count = kernels.library.num_threads
    return f"CPU kernels: native, {kernels.library.instruction_set}, {count} thread{'s' if count != 1 else ''}"


def triton_status(device: torch.device) -> str:
    """Return one line on the GPU kernels: Triton's version, or why plain torch computes on this device."""
    if not LIBRARY.enabled:
        return "GPU kernels: plain torch, because kernels are turned off"
    if not _has_triton():
        return "GPU kernels: plain torch, because Triton is not installed"
    if device.type == "cuda" and not launch.is_capable(device):
        least = "".join(map(str, launch.LEAST_CAPABILITY))
        return f"GPU kernels: plain torch, slower and without captured steps, because the GPU is older than sm_{least}"
    return f"GPU kernels: Triton {importlib.metadata.version('triton')}, but plain torch for models in float32"


def set_threads(count: int) -> None:
    """Set the number of threads of the CPU ops.

    With native kernels, torch's own ops, which are few and small, get one thread: after each op, the threads of torch's
    pool keep the cores busy for a while, which the kernels' pool needs.
    """
    kernels = native_kernels()
    if kernels is not None:
        kernels.library.num_threads = count
    torch.set_num_threads(count if kernels is None else 1)


def timed_calls(listener: Listener) -> AbstractContextManager[None]:
    """Report the name and the seconds of every native call in the block to ``listener``."""
    kernels = native_kernels()
    return nullcontext() if kernels is None else kernels.library.timed(listener)


def native_for(first: Tensor, *others: Tensor) -> Kernels | None:
    """Return the CPU kernels if they can compute with these tensors; else None."""
    kernels = native_kernels() if first.is_cpu else None
    return kernels if kernels is not None and kernels.takes(first, *others) else None


def native_for_kv(x: Tensor, k_cache: Tensor, v_cache: Tensor) -> Kernels | None:
    """Return the CPU kernels if they can use ``x``, the queries or the fused projection, with these caches."""
    kernels = native_kernels() if x.is_cpu else None
    return kernels if kernels is not None and kernels.takes_kv(x, k_cache, v_cache) else None


def native_for_latent(q: Tensor, cache: Tensor, value_dim: int) -> Kernels | None:
    """Return the CPU kernels if they can use these queries with this cache of keys that begin with their values."""
    kernels = native_kernels() if q.is_cpu else None
    return kernels if kernels is not None and kernels.takes_latent(q, cache, value_dim) else None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def on_triton(device: torch.device) -> bool:
    """Return whether Triton kernels compute on this device: installed, enabled, and a CUDA device."""
    return launch.serves(device) and LIBRARY.enabled and _has_triton()
