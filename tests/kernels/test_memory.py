"""Memory that is taken as it is written."""

from __future__ import annotations

import mmap
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from rootgraft.kernels import memory
from rootgraft.kernels.cpu.arena import ReusedMemory, WeightArena


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zeros_of_any_shape(dtype):
    for shape in ((3, 5, 7), (1,), (0, 4)):
        zeros = memory.lazy_zeros(shape, dtype)
        assert (zeros.shape, zeros.dtype, zeros.is_contiguous()) == (shape, dtype, True)
        assert not zeros.any()
        zeros += 1
        assert zeros.sum() == zeros.numel()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_as_it_is_written():
    before = resident()
    zeros = memory.lazy_zeros((64, 1 << 26), torch.uint8)  # 4 GiB
    assert zeros.data_ptr() % mmap.PAGESIZE == 0
    zeros[:, 0] = 1
    assert resident() - before < 64 * (4 << 20)  # at most a huge page for each place, and some noise


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_goes_back_with_the_last_view():
    before = resident()
    view = memory.lazy_zeros((1 << 26,), torch.uint8).fill_(1)[5:7]
    assert resident() - before >= 1 << 26
    assert view.tolist() == [1, 1]
    del view
    assert resident() - before < 1 << 25


def test_without_huge_pages(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not memory.lazy_zeros((1000,), torch.float32).any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_can_be_taken_before_it_is_written():
    zeros = memory.lazy_zeros((4, 1 << 24), torch.uint8)
    zeros[1, 5] = 7
    before = resident()
    memory.populate(zeros[1:3])
    assert (2 << 24) - (4 << 20) <= resident() - before <= (2 << 24) + (8 << 20)
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_a_file_are_released_and_read_again(tmp_path):
    """As a checkpoint's are; what is in no file stays as it is."""
    path = tmp_path / "values"
    path.write_bytes(bytes(range(256)) * (1 << 16))
    count = path.stat().st_size
    mapped = torch.from_file(str(path), size=count, dtype=torch.uint8)
    whole = mapped.clone()
    before = resident()
    memory.release_mapped(mapped[100:])
    assert before - resident() > count - (1 << 20)
    assert torch.equal(mapped, whole)
    memory.release_mapped(whole)
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
