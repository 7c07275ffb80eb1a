"""Launches with copies of their tensors, which a GPU would hold: here the interpreter reads and writes them."""

from __future__ import annotations

import ctypes

import pytest
import torch
import triton
import triton.language as tl
from support.kernels import triton_interpreter
from support.kernels.gpu_copies import Copies, run

from rootgraft.kernels.triton.launch import Launch

pytestmark = pytest.mark.usefixtures("interpreted")


@triton.jit
def _add(table, target, length):
    """``target += table[0]``, where the table holds an address."""
    i = tl.arange(0, 4)
    source = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(target + i, tl.load(target + i, i < length) + tl.load(source + i, i < length), i < length)


def test_what_a_kernel_wrote_is_given_back_and_addresses_lead_to_copies() -> None:
    memory, source = torch.arange(8.0), torch.tensor([10.0, 20.0, 30.0])
    triton_interpreter.allow(source[:1])  # as of a tensor that was here before
    triton_interpreter.allow(source)
    table = torch.tensor([source.data_ptr(), 7])
    before = table.clone()
    run(Launch(_add, (1, 1, 1), (table, memory[4:], 3), {}), device="cpu")
    assert memory.tolist() == [0.0, 1.0, 2.0, 3.0, 14.0, 25.0, 36.0, 7.0]
    assert torch.equal(table, before)
    assert source.tolist() == [10.0, 20.0, 30.0]


@pytest.mark.parametrize("stale", [slice(0, 4), slice(2, 9), slice(1, 3), slice(8, 12)])
def test_memory_of_freed_tensors_hides_no_tensor(stale: slice) -> None:
    """Tensors that were freed leave what was allowed of them: a newer one in their memory may reach beyond it.

    Its address once led to the copy of the older one, behind which a kernel read whatever the GPU had there: two
    property tests of experts failed on a GPU now and then.
    """
    memory = torch.arange(12.0)
    newer = memory[2:10]
    triton_interpreter.allow(memory[stale])
    triton_interpreter.allow(newer)
    copies = Copies("cpu")
    (address,) = copies.of(torch.tensor([newer.data_ptr()])).tolist()
    assert address != newer.data_ptr()
    memory.zero_()
    assert (ctypes.c_float * 8).from_address(address)[:] == list(range(2, 10))


def test_views_of_the_same_memory_stay_such() -> None:
    memory = torch.zeros(6)
    copies = Copies("cpu")
    first, second = copies.of(memory[:4]), copies.of(memory.view(2, 3)[1])
    first[3] = 5.0
    assert second.tolist() == [5.0, 0.0, 0.0]
    assert not memory.any()
    copies.give_back()
    assert memory.tolist() == [0.0, 0.0, 0.0, 5.0, 0.0, 0.0]
