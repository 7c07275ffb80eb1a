"""Memory that is taken as it is written."""

from __future__ import annotations

import mmap
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rootgraft.kernels import memory
from rootgraft.kernels.cpu.arena import ReusedMemory, WeightArena

PAGEMAP = Path("/proc/self/pagemap")
on_linux = pytest.mark.skipif(not PAGEMAP.exists(), reason="reads /proc/self/pagemap")


def resident(tensor: Tensor) -> int:
    """Bytes of a contiguous tensor's pages that are in memory, or were swapped out, whatever else this process has."""
    first = tensor.data_ptr() // mmap.PAGESIZE
    count = -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE) - first
    with PAGEMAP.open("rb") as pages:
        pages.seek(8 * first)
        found = np.frombuffer(pages.read(8 * count), np.uint64)
    return int(np.count_nonzero(found >> np.uint64(62))) * mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zeros_of_any_shape(dtype):
    for shape in ((3, 5, 7), (1,), (0, 4)):
        zeros = memory.lazy_zeros(shape, dtype)
        assert (zeros.shape, zeros.dtype, zeros.is_contiguous()) == (shape, dtype, True)
        assert not zeros.any()
        zeros += 1
        assert zeros.sum() == zeros.numel()


@on_linux
def test_memory_is_taken_as_it_is_written():
    zeros = memory.lazy_zeros((64, 1 << 26), torch.uint8)  # 4 GiB
    assert zeros.data_ptr() % mmap.PAGESIZE == 0
    assert resident(zeros) == 0
    zeros[:, 0] = 1
    assert 64 * mmap.PAGESIZE <= resident(zeros) <= 64 * (2 << 20)  # at most a huge page for each place


@on_linux
def test_memory_goes_back_with_the_last_view(monkeypatch):
    """The block is unmapped when Python's object of it ends, as no other object is of the same memory."""
    blocks: list[weakref.ref[Block]] = []

    class Block(mmap.mmap):
        def __init__(self, *_: object, **__: object) -> None:
            if len(self) == 1 << 26:  # a thread of another test may map memory, too
                blocks.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Block)
    whole = memory.lazy_zeros((1 << 26,), torch.uint8).fill_(1)
    assert resident(whole) == 1 << 26
    view = whole[5:7]
    del whole
    [block] = blocks
    assert view.tolist() == [1, 1] and block() is not None
    del view
    assert block() is None


def test_without_huge_pages(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not memory.lazy_zeros((1000,), torch.float32).any()


@on_linux
def test_memory_can_be_taken_before_it_is_written():
    zeros = memory.lazy_zeros((4, 1 << 24), torch.uint8)
    zeros[1, 5] = 7
    memory.populate(zeros[1:3])
    assert resident(zeros[1:3]) == 2 << 24
    assert resident(zeros) <= (2 << 24) + (4 << 20)  # huge pages may reach beyond both ends
    assert zeros[1:3].sum() == 7


def test_memory_of_a_large_result_is_kept_for_the_next() -> None:
    kept = ReusedMemory()
    first = kept.empty((64, 1024), torch.float32)
    part, place = first[5:6, 7:9], first.data_ptr()
    second = kept.empty((64, 1024), torch.float32)
    assert second.data_ptr() != place, "the first one is in use"
    del first
    third = kept.empty((32, 1024), torch.bfloat16)
    assert third.data_ptr() not in (place, second.data_ptr()), "a view of the first one is in use"
    del part
    again = kept.empty((1024,), torch.int64)
    assert again.data_ptr() == place and again.shape == (1024,) and again.dtype == torch.int64
    del again, second, third
    larger = kept.empty((65, 1024), torch.float32)
    larger.fill_(1.0)
    place = larger.data_ptr()
    del larger
    assert kept.empty((65, 1024), torch.float32).data_ptr() == place


def test_threads_get_memory_of_their_own() -> None:
    kept, wrong = ReusedMemory(), list[float]()

    def use(value: int) -> None:
        for _ in range(300):
            tensor = kept.empty((1000,), torch.float32)
            tensor.fill_(value)
            wrong.extend(tensor[tensor != value].tolist())

    threads = [threading.Thread(target=use, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@on_linux
def test_pages_of_a_file_are_released_and_read_again(tmp_path):
    """As a checkpoint's are; what is in no file stays as it is."""
    path = tmp_path / "values"
    path.write_bytes(bytes(range(256)) * (1 << 16))
    count = path.stat().st_size
    mapped = torch.from_file(str(path), size=count, dtype=torch.uint8)
    whole = mapped.clone()
    inner = mapped[mmap.PAGESIZE :]  # the first page is not whole in what is released
    before = resident(whole)
    assert resident(inner) > 0
    memory.release_mapped(mapped[100:])
    assert resident(inner) == 0
    assert torch.equal(mapped, whole)
    memory.release_mapped(whole)
    assert resident(whole) == before
    assert torch.equal(mapped, whole)
    memory.release_mapped(mapped[:10])


def test_weights_that_are_packed_on_several_threads_do_not_overlap() -> None:
    """Two engines of one process may load at the same time."""
    arena, interval = WeightArena(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            packed = list(threads.map(lambda size: arena.empty((size,), torch.uint8), [64, 192, 64, 4096] * 1000))
    finally:
        sys.setswitchinterval(interval)
    ends = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in packed)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
