"""The GPU's product with weights of 4 to 8 bits, interpreted, against the dequantised weight in fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import triton_interpreter
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from rootgraft.kernels import grouped_weights, ops
from rootgraft.kernels.expert_ops import ExpertWeights, expert_linear
from rootgraft.kernels.grouped_weights import (
    GroupedLinear,
    GroupedPart,
    NumberForm,
    Offsets,
    Scales,
    StoredNumbers,
    pack_grouped,
)
from rootgraft.kernels.triton import expert_product
from rootgraft.kernels.triton import grouped_product as gpu

pytestmark = pytest.mark.usefixtures("interpreted")

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["int4", "int4 zeros", "int4 minima", "int8", "int8 zeros", "e4m3", "mxfp4", "nvfp4", "table"]
SUPER = ["q4_k", "q5_k", "q6_k"]


def random_codes(g: torch.Generator, rows: int, width: int, numbers: NumberForm) -> Tensor:
    codes = torch.randint(0, 1 << numbers.bits, (rows, width), generator=g, dtype=torch.uint8)
    if numbers is NumberForm.E4M3:
        codes[(codes & 0x7F) == 0x7F] = 0
    return codes


def stored(kind: str, rows: int, width: int, group: int | None, seed: int) -> tuple[StoredNumbers, Tensor]:
    """A matrix of random bits, and what it means in fp32, computed here."""
    g = torch.Generator().manual_seed(seed)
    size = group or width
    groups = width // size
    numbers = {
        "int8": NumberForm.INT8,
        "e4m3": NumberForm.E4M3,
        "mxfp4": NumberForm.E2M1,
        "nvfp4": NumberForm.E2M1,
        "table": NumberForm.TABLE,
    }.get(kind.split()[0], NumberForm.INT4)
    codes = random_codes(g, rows, width, numbers)
    scales = torch.rand(rows, groups, generator=g).half() * 0.01
    wide = scales.float().repeat_interleave(size, 1)
    halves = (codes.float(), codes.view(torch.int8).float())
    if kind == "int4":
        return StoredNumbers((rows, width), numbers, [codes], scales), (halves[0] - 8) * wide
    if kind in ("int4 zeros", "int8 zeros"):
        zeros = torch.randint(0, 1 << numbers.bits, (rows, groups), generator=g, dtype=torch.uint8)
        found = StoredNumbers((rows, width), numbers, [codes], scales, offsets=zeros, offset_kind=Offsets.ZERO_POINTS)
        return found, (halves[0] - zeros.float().repeat_interleave(size, 1)) * wide
    if kind == "int4 minima":
        minima = torch.randn(rows, groups, generator=g).half()
        found = StoredNumbers((rows, width), numbers, [codes], scales, offsets=minima, offset_kind=Offsets.MINIMA)
        return found, halves[0] * wide + minima.float().repeat_interleave(size, 1)
    if kind == "int8":
        return StoredNumbers((rows, width), numbers, [codes], scales.float() * 1.1), halves[1] * (wide * 1.1)
    if kind == "e4m3":
        values = codes.view(torch.float8_e4m3fn).float()
        return StoredNumbers((rows, width), numbers, [codes], scales), values * wide
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(codes & 7).int()] * (1 - 2 * (codes >> 3).float())
    if kind == "mxfp4":
        exponents = torch.randint(118, 130, (rows, width // 32), generator=g, dtype=torch.uint8)
        found = StoredNumbers((rows, width), numbers, [codes], exponents, Scales.E8M0)
        return found, values * (exponents.float() - 127).exp2().repeat_interleave(32, 1)
    if kind == "nvfp4":
        small = torch.randint(0, 0x7F, (rows, width // 16), generator=g, dtype=torch.uint8)
        factors = torch.full((rows,), 0.003)
        found = StoredNumbers((rows, width), numbers, [codes], small, Scales.E4M3, factors=factors)
        return found, values * small.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1) * 0.003
    table = torch.randn(16, generator=g)
    found = StoredNumbers((rows, width), numbers, [codes], scales, table=table)
    return found, table[codes.int()] * wide


def super_stored(kind: str, rows: int, width: int, seed: int) -> tuple[StoredNumbers, Tensor]:
    g = torch.Generator().manual_seed(seed)
    numbers = {"q4_k": NumberForm.INT4, "q5_k": NumberForm.INT5, "q6_k": NumberForm.INT6}[kind]
    size, signed = (16, True) if kind == "q6_k" else (32, False)
    codes = random_codes(g, rows, width, numbers)
    kwargs = {"generator": g, "dtype": torch.int8 if signed else torch.uint8}
    scales = torch.randint(-128 if signed else 0, 128 if signed else 64, (rows, width // size), **kwargs)
    d, e = (torch.rand(rows, width // 256, generator=g).half() * 0.01 for _ in range(2))
    wide = scales.float().repeat_interleave(size, 1) * d.float().repeat_interleave(256, 1)
    common = {"scales": scales, "scale_kind": Scales.PRODUCTS, "super_scales": d}
    if kind == "q6_k":
        return StoredNumbers((rows, width), numbers, [codes], **common), (codes.float() - 32) * wide
    minima = torch.randint(0, 64, (rows, width // size), **kwargs)
    low = minima.float().repeat_interleave(size, 1) * e.float().repeat_interleave(256, 1)
    common |= {"offsets": minima, "offset_kind": Offsets.PRODUCTS, "super_offsets": e}
    return StoredNumbers((rows, width), numbers, [codes], **common), codes.float() * wide - low


def packed(found: StoredNumbers, dtype: torch.dtype, bias: Tensor | None = None) -> GroupedLinear:
    layer = pack_grouped([found], CPU, dtype, bias)
    assert layer is not None
    return layer


def assert_product(layer: GroupedLinear, weight: Tensor, num_rows: int) -> None:
    """Sums within fp32's rounding of the oracle, which multiplies the same x with the weight in fp32."""
    x = torch.randn(num_rows, layer.in_features, generator=torch.Generator().manual_seed(1)).to(layer.dtype)
    assert gpu.takes(x, layer)
    y = ops.linear(x, layer, torch.float32)
    expected = x.double() @ weight.double().T
    if layer.bias is not None:
        expected += layer.bias.double()
    size = x.double().abs() @ weight.double().abs().T + 1e-6
    rounding = 2**-8 if layer.form.numbers is NumberForm.TABLE and layer.dtype is not torch.float32 else 2e-6
    assert bool(((y.double() - expected).abs() <= rounding * size + 1e-6).all())
    narrow = ops.linear(x, layer)
    assert narrow.dtype is layer.dtype and torch.equal(narrow, y.to(layer.dtype))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4)
@given(
    rows=st.integers(1, 70),
    blocks=st.integers(1, 3),
    group=st.sampled_from([32, 64, 128, None]),
    num_rows=st.sampled_from([1, 3, 16, 17, 70]),
    dtype=st.sampled_from(TYPES),
    biased=st.booleans(),
)
def test_against_the_dequantised_weight(
    kind: str, rows: int, blocks: int, group: int | None, num_rows: int, dtype: torch.dtype, biased: bool
) -> None:
    found, weight = stored(kind, rows, blocks * (group or 96), group, rows)
    layer = packed(found, dtype, torch.randn(rows).to(dtype) if biased else None)
    torch.testing.assert_close(grouped_weights.dequantise(layer), weight, rtol=1e-6, atol=1e-9)
    assert_product(layer, weight, num_rows)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", SUPER)
def test_super_blocks(kind: str, dtype: torch.dtype) -> None:
    found, weight = super_stored(kind, 37, 512, 5)
    layer = packed(found, dtype)
    torch.testing.assert_close(grouped_weights.dequantise(layer), weight, rtol=1e-6, atol=1e-9)
    assert_product(layer, weight, 5)


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("kind", ["table", "int4", "int4 minima"])
def test_small_integers_as_scales(kind: str, group: int) -> None:
    """Of blocks of 256 of GGUF's types of 1 to 4 bits: an integer for each group, and a factor of the block."""
    rows, width = 21, 512
    g = torch.Generator().manual_seed(group)
    numbers = NumberForm.TABLE if kind == "table" else NumberForm.INT4
    codes = random_codes(g, rows, width, numbers)
    scales = torch.randint(-32, 32, (rows, width // group), generator=g, dtype=torch.int8)
    factors, coarse = (torch.rand(rows, width // 256, generator=g).half() * 0.01 for _ in range(2))
    minima = torch.randint(0, 16, scales.shape, generator=g, dtype=torch.uint8) if "minima" in kind else None
    table = torch.randn(16, generator=g).bfloat16().float()
    found = StoredNumbers(
        (rows, width), numbers, [codes], scales, Scales.PRODUCTS, factors, minima,
        Offsets.MIDDLE if minima is None else Offsets.PRODUCTS, None if minima is None else coarse,
        table=table if kind == "table" else None,
    )  # fmt: skip
    values = table[codes.int()] if kind == "table" else codes.float() - (0 if minima is not None else 8)
    weight = values * (factors.float().repeat_interleave(256, 1) * scales.float().repeat_interleave(group, 1))
    if minima is not None:
        weight -= coarse.float().repeat_interleave(256, 1) * minima.float().repeat_interleave(group, 1)
    layer = packed(found, torch.bfloat16)
    torch.testing.assert_close(grouped_weights.dequantise(layer), weight, rtol=1e-6, atol=1e-9)
    assert_product(layer, weight, 5)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_out_of_order_are_a_permutation_of_x(group: int) -> None:
    """As ``desc_act`` of GPTQ leaves them."""
    width = 256
    found, _ = stored("int4 zeros", 20, width, group, 2)
    group_of = torch.arange(width).div(group, rounding_mode="floor")[torch.randperm(width)]
    (codes,) = found.pieces
    assert found.scales is not None and found.offsets is not None
    weight = (codes.float() - found.offsets.float()[:, group_of]) * found.scales.float()[:, group_of]
    layer = packed(
        StoredNumbers(
            found.shape, found.numbers, [codes], found.scales, offsets=found.offsets,
            offset_kind=Offsets.ZERO_POINTS, group_of=group_of,
        ),
        torch.bfloat16,
    )  # fmt: skip
    assert torch.equal(grouped_weights.dequantise(layer), weight)
    assert_product(layer, weight, 3)


def test_blocks_of_fp8_whose_last_group_is_short() -> None:
    found, _ = stored("e4m3", 5, 576, None, 3)
    scales = torch.rand(5, 5)
    (codes,) = found.pieces
    layer = packed(StoredNumbers((5, 576), NumberForm.E4M3, [codes], scales, group=128), torch.bfloat16)
    weight = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 1)[:, :576]
    assert torch.equal(grouped_weights.dequantise(layer), weight)
    assert_product(layer, weight, 2)


def test_matrices_of_several_forms_side_by_side() -> None:
    """q in 4 bits, k in 8 and v plain: parts of one product, in their order."""
    first, of_first = stored("int4", 33, 128, 32, 0)
    second, of_second = stored("int8", 7, 128, None, 1)
    plain = torch.randn(9, 128).bfloat16()
    layer = pack_grouped([first, second, plain], CPU, torch.bfloat16, torch.randn(49).bfloat16())
    assert layer is not None and len(layer.parts) == 3
    assert_product(layer, torch.cat((of_first, of_second, plain.float())), 4)


def test_matrices_of_one_form_are_one_part() -> None:
    pairs = [stored("int4 zeros", rows, 128, 32, rows) for rows in (33, 7)]
    layer = pack_grouped([each for each, _ in pairs], CPU, torch.bfloat16)
    assert layer is not None and len(layer.parts) == 1
    assert_product(layer, torch.cat([weight for _, weight in pairs]), 4)


def test_rows_for_an_embedding() -> None:
    for kind in KINDS:
        found, weight = stored(kind, 40, 128, 32, 4)
        ids = torch.tensor([3, 0, 39, 3])
        torch.testing.assert_close(
            grouped_weights.rows(packed(found, torch.bfloat16), ids), weight[ids], rtol=1e-6, atol=0
        )


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [*((kind, 3) for kind in (*KINDS, *SUPER)), *((kind, 90) for kind in ("int4 zeros", "e4m3", "nvfp4", "q6_k"))],
)
def test_experts_by_packed_weights(kind: str, tokens: int) -> None:
    """The product of each token with its experts; what no token picked is not read."""
    g = torch.Generator().manual_seed(0)
    made = [
        super_stored(kind, 40, 256, seed) if kind in SUPER else stored(kind, 40, 256, 64, seed) for seed in range(4)
    ]
    layers = [packed(found, torch.bfloat16, torch.randn(40, generator=g).bfloat16()) for found, _ in made]
    for layer in layers:
        (part,) = layer.parts
        assert isinstance(part, GroupedPart) and layer.bias is not None
        triton_interpreter.allow(*(each for each in (*part.tensors, layer.bias) if each is not None))
    weights = ExpertWeights(tuple(layers))
    weights.table[3] = 0  # the interpreter refuses to read there
    x = torch.randn(tokens, 256, generator=g).bfloat16()
    experts = torch.stack([torch.randperm(3, generator=g)[:2] for _ in range(tokens)]).int()
    assert expert_product.takes(x, weights, experts)
    y = expert_linear(x, weights, experts)
    of_picks = torch.stack([made[each][1] for each in range(3)])[experts.long()]
    biases = torch.stack([layer.bias.float() for layer in layers if layer.bias is not None])[experts.long()]
    expected = torch.einsum("tk,tpnk->tpn", x.float(), of_picks) + biases
    torch.testing.assert_close(y.float(), expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()) / 8)


def read_bytes(kind: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytes of the weight that a product's programs touch, each once in a program, and those that are kept."""
    found, _ = super_stored(kind, 64, 512, 1) if kind in SUPER else stored(kind, 64, 512, 32, 1)
    layer = packed(found, torch.bfloat16)
    (part,) = layer.parts
    assert isinstance(part, GroupedPart)
    extents = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in part.tensors[:-1] if each is not None]
    touched: dict[tuple[int, ...], set[int]] = {}
    check = triton_interpreter._check

    def counting(pointers: Any, mask: Any, what: str) -> Any:
        used = check(pointers, mask, what)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        lanes = np.unique(np.asarray(pointers.data, dtype=np.uint64)[used])
        own = touched.setdefault(tuple(interpreter_builder.grid_idx), set())
        for first, end in extents:
            inside = lanes[(lanes >= first) & (lanes < end)]
            own.update(int(lane) + byte for lane in inside for byte in range(size))
        return used

    monkeypatch.setattr(triton_interpreter, "_check", counting)
    ops.linear(torch.randn(num_rows, 512).bfloat16(), layer)
    return sum(map(len, touched.values())), part.nbytes


STORED_BYTES = {
    "int4": 18,
    "int4 zeros": 18.5,
    "int8": 34,
    "e4m3": 34,
    "mxfp4": 17,
    "nvfp4": 18,
    "q4_k": 18,
    "q5_k": 22,
    "q6_k": 26.25,
}
"""Of 32 values in the checkpoint."""


@pytest.mark.parametrize("kind", STORED_BYTES)
def test_a_product_of_few_rows_reads_the_stored_bytes_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1.15 times what the checkpoint has, scales and zero points included."""
    read, kept = read_bytes(kind, 16, monkeypatch)
    assert kept <= read <= 1.15 * STORED_BYTES[kind] * 64 * 512 / 32
