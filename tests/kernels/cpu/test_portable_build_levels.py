"""Libraries for lesser levels of CPUs, run on this one: products of bf16 without instructions for them."""

from __future__ import annotations

import platform

import pytest
import torch
from support.kernels.cpu_levels import WITHOUT_AMX, load_level
from support.kernels.ragged_batches import instruction_sets

from rootgraft.kernels.cpu.native_ops import Kernels

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86")

SHAPES = [(2, 1), (18, 33), (70, 50), (576, 192)]  # in, out: odd numbers of words, panels that are not full
ROWS = (1, 2, 3, 4, 6, 7, 11, 12, 13, 25, 37, 130)  # about the edges of tiles, and more rows than are widened at once


@instruction_sets("avx2", "avx512", "x86-64", WITHOUT_AMX)
@pytest.mark.parametrize(("width", "columns"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_bf16_products(arch, width, columns, biased):
    """Sums of exact products in fp32, whose bits depend neither on other rows nor on threads."""
    kernels = Kernels(load_level(arch))
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, width, generator=generator).bfloat16() for n in (max(ROWS), columns))
    bias = torch.randn(columns, generator=generator).bfloat16() if biased else None
    layer = kernels.pack_linear(weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    whole = kernels.linear(x, layer, torch.float32)
    torch.testing.assert_close(whole.double(), exact, atol=2e-5 * width**0.5, rtol=2e-6)
    rounded = kernels.linear(x, layer, torch.bfloat16)
    assert torch.equal(rounded, whole.bfloat16())
    for threads in (1, 2):
        kernels.library.num_threads = threads
        for rows in ROWS:
            assert torch.equal(kernels.linear(x[:rows], layer, torch.float32), whole[:rows])
            found = kernels.largest_linear(x[-rows:], layer)
            assert torch.equal(found.value, whole[-rows:].amax(1))
            assert torch.equal(found.column, whole[-rows:].argmax(1))


@pytest.mark.heavy
def test_avx2_and_avx512_give_the_same_bits():
    """Both sum products in the order of K with one rounding each."""
    narrow, wide = (Kernels(load_level(level)) for level in ("avx2", "avx512"))
    x, weight = torch.randn(40, 576).bfloat16(), torch.randn(100, 576).bfloat16()
    sums = [kernels.linear(x, kernels.pack_linear(weight, None), torch.float32) for kernels in (narrow, wide)]
    assert torch.equal(*sums)
