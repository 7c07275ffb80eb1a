"""The repairs of Triton's interpreter do what they say."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from support.kernels import triton_interpreter
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.usefixtures("interpreted")


@triton.jit
def _arithmetic(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + N + i, a * b)
    tl.store(out + 2 * N + i, tl.maximum(a, b))
    tl.store(out + 3 * N + i, tl.where(a < b, -a, tl.abs(b)))


@triton.jit
def _narrow(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))


@triton.jit
def _product(x, y, out, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + i * N + j, tl.dot(tl.load(x + i * N + j), tl.load(y + i * N + j)))


@triton.jit
def _shift(x, out, OFFSET: tl.constexpr, OUT: tl.constexpr):
    i = tl.arange(0, 8)
    tl.store(out + OUT + i, tl.load(x + OFFSET + i))


@triton.jit
def _sum_some(x, out, n, DEFINED: tl.constexpr):
    i = tl.arange(0, 8)
    value = tl.load(x + i, i < n, other=0) if DEFINED else tl.load(x + i, i < n)
    tl.store(out, tl.sum(value, 0))


@triton.jit
def _one_or(x, out, n, DEFINED: tl.constexpr):
    value = tl.load(x, n > 0, other=0) if DEFINED else tl.load(x, n > 0)
    tl.store(out, value)


@triton.jit
def _count(out, VALUE: tl.constexpr):
    tl.atomic_add(out + 8 * VALUE, 1.0)


@triton.jit
def _follow(table, out):
    i = tl.arange(0, 8)
    source = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(out + i, tl.load(source + i))


def test_triton_interprets_here():
    assert triton_interpreter.is_interpreting()


def test_bf16_arithmetic_is_that_of_torch():
    x, y = torch.randn(2, 64).bfloat16()
    out = torch.empty(4, 64, dtype=torch.bfloat16)
    _arithmetic[(1,)](x, y, out, 64)
    assert torch.equal(out, torch.stack([x + y, x * y, torch.maximum(x, y), torch.where(x < y, -x, y.abs())]))


def test_narrowing_rounds_to_nearest_even():
    x = torch.cat([torch.randn(1020), torch.tensor([1.00390625, 1.01171875, float("inf"), -3e38])])
    out = torch.empty(1024, dtype=torch.bfloat16)
    _narrow[(1,)](x, out, 1024)
    assert torch.equal(out, x.bfloat16())


def test_narrowing_keeps_nan():
    out = torch.empty(1, dtype=torch.bfloat16)
    _narrow[(1,)](torch.tensor([float("nan")]), out, 1)
    assert out.isnan().all()


def test_a_bf16_product_is_exact():
    x, y = torch.randn(2, 16, 16).bfloat16()
    out = torch.empty(16, 16)
    _product[(1,)](x, y, out, 16)
    torch.testing.assert_close(out, x.float() @ y.float())


@pytest.mark.parametrize(("offset", "out", "what"), [(1, 0, "load"), (-1, 0, "load"), (0, 1, "store")])
def test_a_lane_outside_of_its_tensor_is_found(offset, out, what):
    memory = torch.zeros(24)
    x, target = memory[8:16], torch.zeros(8)
    _shift[(1,)](x, target, 0, 0)
    with pytest.raises(InterpreterError, match=f"{what}: 1 of 8 lanes are outside"):
        _shift[(1,)](x, target, offset, out)


def test_an_atomic_outside_of_its_tensor_is_found():
    out = torch.zeros(8)
    _count[(1,)](out, 0)
    assert out[0] == 1
    with pytest.raises(InterpreterError, match="atomic: 1 of 1 lanes are outside"):
        _count[(1,)](out, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_undefined_lanes_do_harm(dtype):
    x, out = torch.ones(8, dtype=dtype), torch.zeros(1)
    _sum_some[(1,)](x, out, 5, True)
    assert out == 5
    _sum_some[(1,)](x, out, 5, False)
    assert out.isnan()


def test_undefined_integers_do_harm():
    x, out = torch.ones(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    _sum_some[(1,)](x, out, 5, False)
    assert out == 5 + 3 * triton_interpreter.UNDEFINED_INT


def test_a_scalar_that_is_masked_has_its_default():
    x, out = torch.ones(1), torch.ones(1)
    _one_or[(1,)](x, out, 0, True)
    assert out == 0
    _one_or[(1,)](x, out, 0, False)
    assert out.isnan()


def test_addresses_from_a_table_must_be_allowed():
    source, out = torch.randn(8), torch.empty(8)
    table = torch.tensor([source.data_ptr()])
    with pytest.raises(InterpreterError, match="load: 8 of 8 lanes are outside"):
        _follow[(1,)](table, out)
    triton_interpreter.allow(source)
    _follow[(1,)](table, out)
    assert torch.equal(source, out)
