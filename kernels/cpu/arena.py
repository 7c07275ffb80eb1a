"""Memory in huge pages for packed weights and the KV pool.

A decode step reads every weight once and accesses thousands of places in the KV pool. With small pages, part of its
time is spent on address translation (Zen 4: 269 MB of weights in 7.9 ms instead of 8.7). Most weights are smaller than
a huge page, so they share large blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import threading
from typing import Final

import torch
from torch import Tensor

_BLOCK: Final = 64 << 20  # bytes
_ALIGNMENT: Final = 64  # bytes: a cache line
# Number of bytes. For fewer, finding out where they are takes longer than releasing them gains.
_LEAST_RELEASED: Final = 1 << 20
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE of madvise(2), since Linux 5.14


class WeightArena:
    """Allocator of tensors in shared blocks; a block is freed with the last of its tensors. Thread-safe."""

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None
        self._used = 0
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised CPU tensor."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        with self._lock:
            if self._block is None or self._used + size > len(self._block):
                self._block, self._used = _map_block(max(size, _BLOCK)), 0
            tensor = torch.frombuffer(self._block, dtype=dtype, count=count, offset=self._used)
            self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return tensor.view(shape)


class ReusedMemory:
    """Allocator of large tensors that live for a step, such as logits; thread-safe.

    The C library maps memory of more than 32 MiB anew each time, and the operating system zeroes each page when it is
    first written. The logits of 256 rows of 49,152 tokens took 52 ms that way, and take 31 ms here: a block is reused
    for the next tensor once the last tensor in it is freed.
    """

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []
        self._lock = threading.Lock()
        some = [mmap.mmap(-1, 1)]
        self._unused = next(sys.getrefcount(each) for each in some)  # Number of references to a block without tensors.

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised CPU tensor."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        with self._lock:
            fitting = (each for each in self._blocks if len(each) >= size and sys.getrefcount(each) == self._unused)
            block = next(fitting, None)
            # The unused blocks are too small, and are freed here.
            if block is None:
                self._blocks = [each for each in self._blocks if sys.getrefcount(each) > self._unused]
                block = _map_block(size)
                self._blocks.append(block)
            return torch.frombuffer(block, dtype=dtype, count=count).view(shape)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """``kernels.memory.lazy_zeros``."""
    count = math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(_map_block(count * dtype.itemsize), dtype=dtype, count=count).view(shape)


def populate(tensor: Tensor) -> None:
    """``kernels.memory.populate``."""
    if sys.platform != "linux":
        raise OSError("only Linux hands out memory before it is written")
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    _advise(first, tensor.data_ptr() + tensor.nbytes, _POPULATE_WRITE)


def release_mapped(tensor: Tensor) -> None:
    """``kernels.memory.release_mapped``."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end - first >= _LEAST_RELEASED and sys.platform == "linux" and _is_mapped_file(first, end):
        _advise(first, end, mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """``kernels.memory.trim_heap``."""
    # Only glibc has this function.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(ctypes.c_size_t(0))


def _is_mapped_file(first: int, end: int) -> bool:
    """Return whether memory is part of one mapping of a file, according to /proc/self/maps."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, _, _, inode, *_ = line.split()
            from_, to = (int(edge, 16) for edge in span.split("-"))
            if from_ <= first < to:
                return end <= to and inode != "0"
    return False


def _advise(first: int, end: int, advice: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _map_block(size: int) -> mmap.mmap:
    """Map anonymous zeros, which use memory when first written, in huge pages if the operating system has them."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if (advice := getattr(mmap, "MADV_HUGEPAGE", None)) is not None:
        # The kernel may have no huge pages.
        with contextlib.suppress(OSError):
            block.madvise(advice)
    return block
