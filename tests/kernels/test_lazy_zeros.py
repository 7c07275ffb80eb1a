"""Memory that is taken as it is written."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from rootgraft.kernels import memory


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
