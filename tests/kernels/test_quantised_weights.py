"""Weights of 4 and 8 bits: against the gguf package and plain torch, in every batch and on every instruction set."""

from __future__ import annotations

import dataclasses
import itertools
import platform

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import quantised_reference
from support.kernels.cpu_levels import WITHOUT_AMX, load_level
from support.kernels.ragged_batches import instruction_sets
from support.machine.thoroughness import repeats
from torch import Tensor
from torch.nn import functional

from rootgraft.kernels import ops, quantised_weights
from rootgraft.kernels.cpu import build
from rootgraft.kernels.cpu.native_library import Buffers, NativeLibrary
from rootgraft.kernels.cpu.native_ops import Kernels
from rootgraft.kernels.cpu.native_quantised import QuantisedKernels
from rootgraft.kernels.cpu.recorded_pass import record
from rootgraft.kernels.layouts.packed_weights import Format, JoinedLinear, QuantisedLinear, parts_of

pytestmark = pytest.mark.usefixtures("kernels")

TYPES = st.sampled_from([torch.bfloat16, torch.float32])
BLOCKS: list[quantised_weights.BlockType] = ["Q4_0", "Q4_1", "Q8_0"]
SUPER_BLOCKS: list[quantised_weights.BlockType] = ["Q4_K", "Q6_K", "Q5_K", "Q3_K", "Q2_K", "IQ4_XS"]
ROUNDED_BLOCKS: list[quantised_weights.BlockType] = [*SUPER_BLOCKS, "Q5_0", "Q5_1"]  # take x in 8 bits, not in 15
WIDENED_BLOCKS: list[quantised_weights.BlockType] = [*ROUNDED_BLOCKS, "U4_ZERO_POINT", "IQ4_NL", "E2M1", "NVFP4", "IQ2"]
FACTORS = {
    "Q4_1": (0, 4),
    "Q5_1": (0, 4),
    "Q4_K": (0, 4),
    "Q5_K": (0, 4),
    "Q6_K": (208, 210),
    "Q3_K": (108, 110),
    "IQ2": (108, 110),
    "Q2_K": (80, 84),
}
TWICE_E2M1 = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0]
GRID = [1.0, 3.125, 5.375, 0.0, -1.0, -3.125, -5.375, 0.0]
LARGEST = {True: quantised_reference.BYTE, False: quantised_reference.TWO_BYTES}  # integer of x, by ``dynamic``


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def blocks(block_type: quantised_weights.BlockType, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The raw rows of a weight, and what they stand for, by the gguf package."""
    kind = gguf.GGMLQuantizationType[block_type]
    raw = gguf.quants.quantize(weight.numpy(), kind)
    return torch.from_numpy(raw.copy()), torch.from_numpy(gguf.quants.dequantize(raw, kind).copy())


def random_blocks(
    block_type: quantised_weights.BlockType, seed: int, columns: int, width: int
) -> tuple[Tensor, Tensor]:
    """The same of random bytes, for types that the package does not quantise to too; factors are of the order of 1."""
    values, size = quantised_weights.BLOCK_SIZES[block_type]
    raw = torch.randint(256, (columns, width // values, size), dtype=torch.uint8, generator=generator(seed))
    if block_type == "NVFP4":
        return raw.flatten(1), with_float8_scales(raw, seed)
    halves = FACTORS.get(block_type, (0, 2))
    factors = randn(seed + 1, columns, width // values, (halves[1] - halves[0]) // 2).half()
    factors[1::5] *= torch.randint(2, factors[1::5].shape, generator=generator(seed + 2))  # some are 0 or -0
    factors[2::5] *= 2.0**-18  # some have no leading digit
    raw[:, :, halves[0] : halves[1]] = factors.view(torch.uint8)
    if block_type == "U4_ZERO_POINT":
        return raw.flatten(1), with_zero_points(raw, factors, seed + 3)
    if block_type == "E2M1":
        numbers = torch.cat((raw[:, :, 2:] & 15, raw[:, :, 2:] >> 4), dim=-1).long()
        return raw.flatten(1), (torch.tensor(TWICE_E2M1)[numbers] * factors.float()).flatten(1)
    if block_type == "IQ2":
        return raw.flatten(1), of_grid(raw)
    raw, kind = raw.flatten(1), gguf.GGMLQuantizationType[block_type]
    return raw, torch.from_numpy(gguf.quants.dequantize(raw.numpy(), kind).copy())


def of_grid(raw: Tensor) -> Tensor:
    """Return what blocks as those of Q3_K stand for whose numbers choose values of a grid."""
    without = raw.clone()
    without[:, :, :96] = 0  # all numbers are then -4
    kind = gguf.GGMLQuantizationType.Q3_K
    scales = torch.from_numpy(gguf.quants.dequantize(without.flatten(1).numpy(), kind).copy()) / -4
    third = (raw[:, :, None, :32] >> torch.arange(8)[:, None]) & 1
    pairs = (raw[:, :, 32:96].unflatten(2, (2, 1, 32)) >> torch.tensor((0, 2, 4, 6))[:, None]) & 3
    return scales * torch.tensor(GRID)[(pairs.flatten(2) | third.flatten(2) << 2).flatten(1).long()]


def with_float8_scales(raw: Tensor, seed: int) -> Tensor:
    """Write factors in fp32 and scales in E4M3 into super-blocks of NVFP4, and return what they stand for."""
    columns, supers, _ = raw.shape
    factors = randn(seed + 1, columns, 1, 1).expand(columns, supers, 1).contiguous()
    scales = randn(seed + 2, columns, supers, 16).to(torch.float8_e4m3fn)
    scales[1::5] = 2.0**-9  # no leading digit
    scales[2::5, :, ::3] = 0
    raw[:, :, :4], raw[:, :, 4:20] = factors.view(torch.uint8), scales.view(torch.uint8)
    halves = raw[:, :, 20:].unflatten(2, (8, 16))
    numbers = torch.cat((halves & 15, halves >> 4), dim=-1).view(columns, supers, 16, 16).long()
    return ((factors * scales.float())[..., None] * torch.tensor(TWICE_E2M1)[numbers]).flatten(1)


def with_zero_points(raw: Tensor, scales: Tensor, seed: int) -> Tensor:
    """Write zero points into blocks of 20 bytes, and return what the blocks stand for."""
    zeros = torch.randint(16, scales.shape, generator=generator(seed)).half()
    raw[:, :, 2:4] = zeros.view(torch.uint8)
    numbers = torch.cat((raw[:, :, 4:] & 15, raw[:, :, 4:] >> 4), dim=-1).float()
    return ((numbers - zeros.float()) * scales.float()).flatten(1)


def with_outliers(x: Tensor, share: float) -> Tensor:
    """Some values a hundred times as large, some rows all zeros but one, or all."""
    chosen = torch.rand(x.shape, generator=torch.Generator().manual_seed(9)) < share
    x = x.where(~chosen, x * 100)
    x[1::5, 1:] = 0
    x[2::5] = 0
    return x


def assert_near(actual: Tensor, expected: Tensor, magnitudes: Tensor | None = None) -> None:
    """fp32 sums of some hundred products against fp64.

    ``magnitudes`` are the sums of the products' magnitudes, where they may be far above the sums: to 1e-6 of those.
    """
    sizes = expected.abs() if magnitudes is None else torch.maximum(expected.abs(), magnitudes / 20)
    largest = functional.pad(sizes, (0, 1), value=1.0).amax(1, keepdim=True)  # of each row
    torch.testing.assert_close(actual / largest, expected / largest, rtol=1e-5, atol=2e-5)


def assert_same_largest(found: ops.Largest, values: Tensor) -> None:
    """Of each row, to the bit."""
    assert torch.equal(found.value, values.amax(1))
    assert torch.equal(found.column, values.argmax(1))


@settings(max_examples=repeats(60), deadline=None)
@given(
    block_type=st.sampled_from(BLOCKS),
    tokens=st.integers(0, 20),
    num_blocks=st.integers(1, 7),
    columns=st.integers(1, 130),
    bias=st.booleans(),
    dynamic=st.booleans(),
    dtype=TYPES,
    seed=st.integers(0, 1 << 30),
)
def test_blocks(block_type, tokens, num_blocks, columns, bias, dynamic, dtype, seed):
    raw, weight = blocks(block_type, randn(seed, columns, 32 * num_blocks))
    offset = randn(seed + 1, columns, dtype=dtype) if bias else None
    x = randn(seed + 2, tokens, 32 * num_blocks, dtype=dtype)
    layer = quantised_weights.pack_blocks(raw, block_type, offset, dynamic=dynamic)
    assert (layer.in_features, layer.out_features) == (32 * num_blocks, columns)
    assert torch.equal(quantised_weights.rows(layer, torch.arange(columns)), weight)
    out = ops.linear(x, layer, torch.float32)
    exact = quantised_reference.linear(x, weight, 32, LARGEST[dynamic])
    assert_near(out, exact + (0 if offset is None else offset.double()))
    assert torch.equal(ops.linear(x, layer), out.to(dtype))
    assert_same_largest(ops.largest_linear(x, layer), out)


@settings(max_examples=repeats(40), deadline=None)
@given(
    block_type=st.sampled_from(ROUNDED_BLOCKS),
    tokens=st.integers(0, 20),
    num_blocks=st.integers(1, 3),
    columns=st.integers(1, 70),
    dtype=TYPES,
    seed=st.integers(0, 1 << 30),
)
def test_blocks_times_rows_of_8_bits(block_type, tokens, num_blocks, columns, dtype, seed):
    raw, weight = random_blocks(block_type, seed, columns, 256 * num_blocks)
    offset, x = randn(seed + 1, columns), randn(seed + 2, tokens, 256 * num_blocks, dtype=dtype)
    layer = quantised_weights.pack_blocks(raw, block_type, offset, dynamic=True)
    assert layer.planes == 1
    assert torch.equal(quantised_weights.rows(layer, torch.arange(columns)), weight)
    out = ops.linear(x, layer, torch.float32)
    magnitudes = x.double().abs() @ largest_terms(block_type, weight).double().T
    assert_near(out, quantised_reference.linear(x, weight, 32) + offset.double(), magnitudes)
    assert torch.equal(ops.linear(x, layer), out.to(dtype))
    assert_same_largest(ops.largest_linear(x, layer), out)
    for row in range(0, tokens, 3):
        assert torch.equal(ops.linear(x[row : row + 1], layer, torch.float32), out[row : row + 1])


def largest_terms(block_type: quantised_weights.BlockType, weight: Tensor) -> Tensor:
    """The largest magnitude of each super-block: terms of its numbers, a scale's and a minimum's, may be as large."""
    values = quantised_weights.BLOCK_SIZES[block_type][0]
    return weight.abs().unflatten(1, (-1, values)).amax(-1).repeat_interleave(values, 1)


@settings(max_examples=repeats(80), deadline=None)
@given(
    block_type=st.sampled_from(BLOCKS + WIDENED_BLOCKS),
    tokens=st.one_of(st.integers(0, 20), st.sampled_from([33, 70, 140])),
    num_blocks=st.integers(1, 7),
    columns=st.integers(1, 200),
    bias=st.booleans(),
    dtype=TYPES,
    seed=st.integers(0, 1 << 30),
)
def test_widened_blocks_have_the_bits_of_a_plain_weight(block_type, tokens, num_blocks, columns, bias, dtype, seed):
    width = num_blocks * quantised_weights.BLOCK_SIZES[block_type][0]
    raw, weight = random_blocks(block_type, seed, columns, width)
    offset = randn(seed + 2, columns, dtype=dtype) if bias else None
    layer = quantised_weights.pack_blocks(raw, block_type, offset, widened=True)
    assert torch.equal(quantised_weights.rows(layer, torch.arange(columns)), weight)
    plain, x = ops.pack_linear(weight.to(dtype), offset), randn(seed + 3, tokens, width, dtype=dtype)
    for out_dtype in (dtype, torch.float32):
        assert torch.equal(ops.linear(x, layer, out_dtype), ops.linear(x, plain, out_dtype))
    assert_same_largest(ops.largest_linear(x, layer), ops.linear(x, plain, torch.float32))


@settings(max_examples=repeats(80), deadline=None)
@given(
    block_type=st.sampled_from(BLOCKS + WIDENED_BLOCKS),
    tokens=st.one_of(st.integers(0, 20), st.sampled_from([32, 33, 47, 64, 65, 140])),
    few_rows=st.sampled_from([0, 1, 4, 16, 64, 1000]),
    num_blocks=st.integers(1, 7),
    columns=st.one_of(st.integers(1, 200), st.sampled_from([32, 96])),
    bias=st.booleans(),
    dtype=TYPES,
    seed=st.integers(0, 1 << 30),
)
def test_both_forms_have_the_bits_of_a_plain_weight(
    block_type, tokens, few_rows, num_blocks, columns, bias, dtype, seed
):
    width = num_blocks * quantised_weights.BLOCK_SIZES[block_type][0]
    raw, weight = random_blocks(block_type, seed, columns, width)
    offset = randn(seed + 2, columns, dtype=dtype) if bias else None
    packed = quantised_weights.pack_blocks(raw, block_type, offset, widened=True)
    layer = quantised_weights.with_widened(packed, dtype, offset, few_rows=few_rows)
    plain, x = ops.pack_linear(weight.to(dtype), offset), randn(seed + 3, tokens, width, dtype=dtype)
    assert torch.equal(layer.widened.weight, plain.weight)
    assert torch.equal(quantised_weights.rows(layer, torch.arange(columns)), weight)
    assert layer.format.description == packed.format.description
    for out_dtype in (dtype, torch.float32):
        assert torch.equal(ops.linear(x, layer, out_dtype), ops.linear(x, plain, out_dtype))
    assert_same_largest(ops.largest_linear(x, layer), ops.linear(x, plain, torch.float32))
    if columns % 2 == 0:
        assert torch.equal(ops.gated_linear(x, layer, "silu"), ops.gated_linear(x, plain, "silu"))


@pytest.mark.parametrize("block_type", BLOCKS + WIDENED_BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_forms_on_more_threads_and_in_the_other_type(block_type, dtype):
    """Rows of x of another type than the widened form are multiplied with the blocks."""
    raw, weight = random_blocks(block_type, 7, 288, 1536)
    layer = quantised_weights.with_widened(
        quantised_weights.pack_blocks(raw, block_type, widened=True), dtype, few_rows=40
    )
    for x_dtype in (torch.bfloat16, torch.float32):
        plain, x = ops.pack_linear(weight.to(x_dtype)), randn(3, 300, 1536, dtype=x_dtype)
        for threads, count in itertools.product((1, 2, 3), (1, 3, 16, 17, 40, 41, 300)):
            ops.set_threads(threads)
            assert torch.equal(ops.linear(x[:count], layer), ops.linear(x[:count], plain))
            assert torch.equal(ops.gated_linear(x[:count], layer, "relu2"), ops.gated_linear(x[:count], plain, "relu2"))


@pytest.mark.parametrize("block_type", BLOCKS + WIDENED_BLOCKS)
def test_blocks_take_what_they_take_in_the_file(block_type):
    raw, _ = random_blocks(block_type, 7, 64, 512)
    packed = quantised_weights.pack_blocks(raw, block_type, widened=True)
    assert packed.weight.nbytes + packed.scales.nbytes <= 1.08 * raw.nbytes


def test_a_flushed_weight_is_the_same():
    raw, weight = random_blocks("Q8_0", 7, 64, 96)
    packed = quantised_weights.pack_blocks(raw, "Q8_0", widened=True)
    layer = quantised_weights.with_widened(packed, torch.float32, few_rows=2)
    for each in (packed, layer):
        quantised_weights.flush(each)
        assert torch.equal(quantised_weights.rows(each, torch.arange(64)), weight)
    assert torch.equal(layer.widened.weight, ops.pack_linear(weight).weight)


def test_a_recorded_product_takes_either_form_by_its_rows():
    raw, weight = random_blocks("Q4_1", 7, 64, 96)
    packed = quantised_weights.pack_blocks(raw, "Q4_1", widened=True)
    layer = quantised_weights.with_widened(packed, torch.bfloat16, few_rows=4)
    plain, x = ops.pack_linear(weight.bfloat16()), torch.empty(9, 96, dtype=torch.bfloat16)
    out, replay = record(ops.native_kernels().library, lambda: ops.linear(x, layer), Buffers(9))
    assert replay is not None
    for count in (1, 4, 5, 9):
        x.copy_(randn(count, 9, 96, dtype=torch.bfloat16))
        replay.replay(count, count)
        assert torch.equal(out[:count], ops.linear(x[:count], plain))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_weights_of_several_forms_are_joined(out_dtype):
    """With the bits of the plain weight, in recorded passes too."""
    found = [random_blocks(kind, 3, 48, 256) for kind in ("Q4_K", "Q6_K")]
    q4_k, q6_k = (
        quantised_weights.pack_blocks(raw, kind, widened=True)
        for (raw, _), kind in zip(found, ("Q4_K", "Q6_K"), strict=True)
    )
    last = randn(4, 16, 256).bfloat16()
    weight = torch.cat([*(each.bfloat16() for _, each in found), last])
    layer = JoinedLinear.of(JoinedLinear.of(q4_k, q6_k), ops.pack_linear(last))
    assert (layer.in_features, layer.out_features, len(parts_of(layer))) == (256, 112, 3)
    plain, x = ops.pack_linear(weight), torch.empty(9, 256, dtype=torch.bfloat16)
    out, replay = record(ops.native_kernels().library, lambda: ops.linear(x, layer, out_dtype), Buffers(9))
    assert replay is not None
    for count in (1, 9):
        x.copy_(randn(count, 9, 256, dtype=torch.bfloat16))
        replay.replay(count, count)
        assert torch.equal(out[:count], ops.linear(x[:count], plain, out_dtype))
    assert torch.equal(ops.linear(x, layer, out_dtype), ops.linear(x, plain, out_dtype))
    assert torch.equal(ops.gated_linear(x, layer, "silu"), ops.gated_linear(x, plain, "silu"))
    assert_same_largest(ops.largest_linear(x, layer), ops.linear(x, plain, torch.float32))


@pytest.mark.parametrize("block_type", BLOCKS + WIDENED_BLOCKS)
def test_rows_that_come_in_pieces_make_the_same_weight(block_type):
    raw, _ = random_blocks(block_type, 0, 53, 512)
    whole = quantised_weights.pack_blocks(raw, block_type, widened=True)
    pieces = quantised_weights.pack_block_rows(iter(raw.split([32, 16, 5])), raw.shape, block_type, widened=True)
    assert torch.equal(pieces.weight, whole.weight)
    assert torch.equal(pieces.scales.view(torch.int16), whole.scales.view(torch.int16))  # whose bytes may look like NaN
    for wrong in ([raw[:48]], [raw[:30], raw[30:]], [raw, raw]):
        with pytest.raises(ValueError, match="rows of blocks"):
            quantised_weights.pack_block_rows(wrong, raw.shape, block_type, widened=True)


@settings(max_examples=repeats(60), deadline=None)
@given(
    dynamic=st.booleans(),
    tokens=st.integers(0, 20),
    width=st.one_of(st.integers(1, 150), st.sampled_from([64, 192, 576])),  # those that AMX takes
    columns=st.integers(1, 130),
    bias=st.booleans(),
    outliers=st.sampled_from([0.0, 0.01, 0.3]),
    weight_dtype=TYPES,
    dtype=TYPES,
    seed=st.integers(0, 1 << 30),
)
def test_channels(dynamic, tokens, width, columns, bias, outliers, weight_dtype, dtype, seed):
    width += width % 2 if torch.bfloat16 in (dtype, weight_dtype) else 0
    original = randn(seed, columns, width, dtype=weight_dtype)
    offset = randn(seed + 1, columns) if bias else None
    x = with_outliers(randn(seed + 2, tokens, width, dtype=dtype), outliers)
    layer = quantised_weights.pack_channels(original, offset, dynamic=dynamic)
    weight = quantised_reference.channels(original)
    assert torch.equal(quantised_weights.rows(layer, torch.arange(columns)), weight)
    exact = quantised_reference.linear_rows(x, weight) if dynamic else x.double() @ weight.double().T
    out = ops.linear(x, layer, torch.float32)
    assert_same_largest(ops.largest_linear(x, layer), out)
    assert_near(out, exact + (0 if offset is None else offset.double()), x.double().abs() @ weight.double().abs().T)
    assert torch.equal(ops.linear(x, layer), out.to(dtype))


@settings(max_examples=repeats(40), deadline=None)
@given(
    tokens=st.integers(1, 20),
    width=st.integers(1, 1200),
    outliers=st.sampled_from([0.0, 0.003, 0.05]),
    spoiler=st.sampled_from([1.0, float("nan"), float("-inf"), 1e-33]),
    seed=st.integers(0, 1 << 30),
)
def test_activations_of_both_types_make_the_same_integers(tokens, width, outliers, spoiler, seed):
    width += width % 2
    x = with_outliers(randn(seed, tokens, width, dtype=torch.bfloat16), outliers)
    x[seed % tokens, seed % width] *= spoiler
    layer = quantised_weights.pack_channels(randn(seed + 1, 40, width), None, dynamic=True)
    of_bf16, of_fp32 = (ops.linear(each, layer, torch.float32) for each in (x, x.float()))
    torch.testing.assert_close(of_bf16, of_fp32, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=repeats(60), deadline=None)
@given(
    form=st.sampled_from(["channels", *BLOCKS, *WIDENED_BLOCKS]),
    tokens=st.one_of(st.integers(0, 20), st.sampled_from([33, 70, 140])),
    num_blocks=st.integers(1, 3),
    width=st.sampled_from([16, 48, 64, 112, 30]),
    kind=st.sampled_from(["silu", "gelu_tanh", "relu2", "gelu"]),
    dtype=TYPES,
    seed=st.integers(0, 1 << 30),
)
def test_a_gated_product_is_two_ops(form, tokens, num_blocks, width, kind, dtype, seed):
    in_features = num_blocks * (64 if form == "channels" else quantised_weights.BLOCK_SIZES[form][0])
    if form == "channels":
        layer = quantised_weights.pack_channels(randn(seed, 2 * width, in_features), dynamic=True)
    else:
        layer = quantised_weights.pack_blocks(random_blocks(form, seed, 2 * width, in_features)[0], form, widened=True)
    x = with_outliers(randn(seed + 2, tokens, in_features, dtype=dtype), 0.01)
    out = ops.gated_linear(x, layer, kind)
    assert torch.equal(out, ops.gated_activation(ops.linear(x, layer), kind)) and out.dtype is dtype


def layers(width: int, columns: int) -> list[QuantisedLinear]:
    weight, bias = randn(0, columns, width), randn(1, columns)
    raw = {name: blocks(name, weight)[0] for name in BLOCKS}
    return [
        layer
        for dynamic in (True, False)
        for layer in (
            *(quantised_weights.pack_blocks(raw[name], name, bias, dynamic=dynamic) for name in BLOCKS),
            quantised_weights.pack_channels(weight.bfloat16(), dynamic=dynamic),
        )
    ] + [quantised_weights.pack_blocks(raw[name], name, bias, widened=True) for name in BLOCKS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "columns"), [(64, 16), (576, 200), (1536, 40), (192, 224), (1536, 288)])
def test_a_row_does_not_depend_on_its_batch(dtype, width, columns):
    x = randn(3, 130, width, dtype=dtype)
    for layer in layers(width, columns):
        whole = ops.linear(x, layer)
        assert_same_gated(x, layer)
        for count in (1, 2, 3, 5, 7, 8, 13, 31, 64, 100):
            assert torch.equal(ops.linear(x[:count], layer), whole[:count])
            assert torch.equal(ops.linear(x[130 - count :], layer), whole[130 - count :])
            assert_same_gated(x[:count], layer)
        for threads in (2, 3):
            ops.set_threads(threads)
            assert torch.equal(ops.linear(x, layer), whole)
            assert torch.equal(ops.linear(x[:1], layer), whole[:1])
        ops.set_threads(1)


@pytest.mark.parametrize("columns", [40_000, 40_008])
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_too_large_for_caches(columns, threads):
    x, weight = with_outliers(randn(0, 33, 64, dtype=torch.bfloat16), 0.02), randn(1, columns, 64)
    layer = quantised_weights.pack_channels(weight, None, dynamic=True)
    few = torch.cat([ops.linear(some, layer, torch.float32) for some in x.split(8)])
    ops.set_threads(threads)
    assert torch.equal(ops.linear(x, layer, torch.float32), few)
    ops.set_threads(1)


def assert_same_gated(x: Tensor, layer: QuantisedLinear) -> None:
    layer = dataclasses.replace(layer, bias=None)
    assert torch.equal(ops.gated_linear(x, layer, "silu"), ops.gated_activation(ops.linear(x, layer), "silu"))


@pytest.mark.parametrize("spoiler", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_and_in_its_row(spoiler):
    for layer in layers(64, 20):
        x = randn(5, 9, 64, dtype=torch.bfloat16)
        clean = ops.linear(x, layer)
        x[4, 3] = spoiler
        out = ops.linear(x, layer)
        assert not out[4].isfinite().any()
        assert torch.equal(out[:4], clean[:4]) and torch.equal(out[5:], clean[5:])


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-33, 1e30])
def test_very_small_and_large_activations(size):
    x = torch.full((3, 64), size)
    for layer in layers(64, 20):
        expected = x.double() @ quantised_weights.rows(layer, torch.arange(20)).double().T
        if layer.bias is not None:
            expected += layer.bias.double()
        torch.testing.assert_close(ops.linear(x, layer).double(), expected, rtol=1e-4, atol=size * 1e-3 + 1e-25)


def test_refusals():
    with pytest.raises(ValueError, match="whole Q4_1 blocks of 20 bytes"):
        quantised_weights.pack_blocks(torch.zeros(4, 30, dtype=torch.uint8), "Q4_1", dynamic=True)
    raw = torch.zeros(4, 34, dtype=torch.uint8)
    raw[2, 1] = 0x7C  # infinity
    with pytest.raises(ValueError, match="infinite or not a number"):
        quantised_weights.pack_blocks(raw, "Q8_0", dynamic=False)
    for name in SUPER_BLOCKS:
        first, end = FACTORS.get(name, (0, 2))
        for at in range(first + 1, end, 2):
            raw = torch.zeros(4, quantised_weights.BLOCK_SIZES[name][1], dtype=torch.uint8)
            raw[2, at] = 0x7C
            with pytest.raises(ValueError, match="a super-block has a factor that is infinite"):
                quantised_weights.pack_blocks(raw, name, widened=True)
    raw = torch.zeros(4, 210, dtype=torch.uint8)
    with pytest.raises(ValueError, match="Q6_K blocks and such rows of x are not supported"):
        quantised_weights.pack_blocks(raw, "Q6_K")
    with pytest.raises(ValueError, match="not both"):
        quantised_weights.pack_blocks(torch.zeros(4, 34, dtype=torch.uint8), "Q8_0", dynamic=True, widened=True)
    with pytest.raises(ValueError, match="cannot be quantised by channels"):
        quantised_weights.pack_channels(torch.zeros(4, 7, dtype=torch.bfloat16), dynamic=True)
    layer = quantised_weights.pack_channels(randn(0, 20, 64), dynamic=True)
    with pytest.raises(ValueError, match=r"in 8 bits .* has no widened form"):
        quantised_weights.with_widened(layer, torch.bfloat16, few_rows=4)
    packed = quantised_weights.pack_blocks(blocks("Q8_0", randn(0, 20, 64))[0], "Q8_0", widened=True)
    with pytest.raises(ValueError, match="8-bit blocks has no widened form in torch"):
        quantised_weights.with_widened(packed, torch.float16, few_rows=4)
    both = quantised_weights.with_widened(packed, torch.bfloat16, few_rows=4)
    with pytest.raises(ValueError, match=r"8-bit blocks has no widened form in .* beside it"):
        quantised_weights.with_widened(both, torch.bfloat16, few_rows=4)
    for wrong in (20, -1):
        with pytest.raises(IndexError, match=r"not in 0 \.\. 19"):
            quantised_weights.rows(layer, torch.tensor([0, wrong]))
    with pytest.raises(ValueError, match="ids must be int64"):
        quantised_weights.rows(layer, torch.tensor([0], dtype=torch.int32))
    with pytest.raises(ValueError, match="the layer takes"):
        ops.linear(torch.zeros(2, 65), layer)
    with pytest.raises(ValueError, match="the layer takes"):
        ops.linear(torch.zeros(2, 64, dtype=torch.float16), layer)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 instruction sets")
@instruction_sets("avx2", "x86-64", "avx512", WITHOUT_AMX)
def test_lesser_instruction_sets(arch, monkeypatch):
    """What other machines would compile, run on this one: integer sums are exact, so blocks give the same bits."""
    kernels = QuantisedKernels(load_level(arch))
    weight, x = randn(0, 70, 192), with_outliers(randn(1, 9, 192, dtype=torch.bfloat16), 0.02)
    for name, dynamic in itertools.product(BLOCKS, (True, False)):
        raw, exact = blocks(name, weight)
        layer = quantised_weights.pack_blocks(raw, name, dynamic=dynamic)
        other = dataclasses.replace(layer, kernels=kernels)
        assert torch.equal(kernels.rows(other, torch.arange(70)), exact)
        expected = quantised_reference.linear(x, exact, 32, LARGEST[dynamic])
        assert_near(kernels.linear(x, other, torch.float32), expected)
    x = randn(2, 9, 512, dtype=torch.bfloat16)
    for name in (*BLOCKS, *WIDENED_BLOCKS):
        raw, exact = random_blocks(name, 3, 70, 512)
        with monkeypatch.context() as patch:
            patch.setattr(quantised_weights, "_kernels", lambda: kernels)
            other = quantised_weights.pack_blocks(raw, name, widened=True)
        assert torch.equal(kernels.rows(other, torch.arange(70)), exact)
        rounded = exact.bfloat16().double()
        magnitudes = x.double().abs() @ rounded.abs().T
        assert_near(kernels.linear(x, other, torch.float32), x.double() @ rounded.T, magnitudes)
        few, many = (kernels.with_widened(other, torch.bfloat16, None, few_rows) for few_rows in (9, 0))
        assert torch.equal(kernels.linear(x, few, torch.float32), kernels.linear(x, many, torch.float32))
        if name in ROUNDED_BLOCKS:
            own = quantised_weights.pack_blocks(raw, name, dynamic=True)
            other = dataclasses.replace(own, kernels=kernels)
            assert torch.equal(kernels.rows(other, torch.arange(70)), exact)
            magnitudes = x.double().abs() @ largest_terms(name, exact).double().T
            assert_near(kernels.linear(x, other, torch.float32), quantised_reference.linear(x, exact, 32), magnitudes)
    x = with_outliers(randn(1, 9, 192, dtype=torch.bfloat16), 0.02)
    for form in (Format.CHANNELS, Format.WIDENED):
        other, layer = kernels.pack_channels(weight, form, None), quantised_weights.pack_channels(weight, dynamic=True)
        assert torch.equal(other.weight, layer.weight) and torch.equal(other.scales, layer.scales)
        out = kernels.linear(x, other, torch.float32)
        exact = quantised_reference.channels(weight)
        assert_near(
            out,
            quantised_reference.linear_rows(x, exact) if form is Format.CHANNELS else x.double() @ exact.double().T,
        )
        assert torch.equal(kernels.linear(x[4:5], other, torch.float32), out[4:5])


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16, 17, 33, 70])
@pytest.mark.parametrize("columns", [16, 40, 130])
def test_amx_gives_the_bits_of_vectors(columns, tokens):
    """Its sums are exact, and scaled alike."""
    if "AMX" not in ops.native_status():
        pytest.skip("no AMX")
    vectors = QuantisedKernels(NativeLibrary(build.load_library(build.default_cache(), "icelake-server")))
    x, weight, bias = with_outliers(randn(1, tokens, 192), 0.02), randn(0, columns, 192), randn(2, columns)
    raw = {name: blocks(name, weight)[0] for name in BLOCKS}
    for plain, dtype in itertools.product(
        (
            quantised_weights.pack_channels(weight, dynamic=True),
            *(
                quantised_weights.pack_blocks(raw[name], name, dynamic=dynamic)
                for name in BLOCKS
                for dynamic in (True, False)
            ),
        ),
        (torch.bfloat16, torch.float32),
    ):
        for layer in (plain, dataclasses.replace(plain, bias=bias)):
            assert_same_bits(x.to(dtype), layer, dataclasses.replace(layer, kernels=vectors))


def assert_same_bits(x: Tensor, layer: QuantisedLinear, other: QuantisedLinear) -> None:
    """Of all that a layer can give, by the kernels of both."""
    for dtype in (torch.bfloat16, torch.float32):
        if x.dtype is torch.bfloat16 or dtype is torch.float32:
            assert torch.equal(ops.linear(x, layer, dtype), ops.linear(x, other, dtype))
    found, expected = ops.largest_linear(x, layer), ops.largest_linear(x, other)
    assert torch.equal(found.value, expected.value) and torch.equal(found.column, expected.column)


def test_two_bytes_of_x_hold_more_than_bfloat16():
    """Against the exact product, rounding x to 15 bits in blocks costs less than rounding it to bfloat16."""
    raw, weight = blocks("Q4_1", randn(0, 200, 576))
    x = randn(1, 50, 576)
    exact = x.double() @ weight.double().T
    fine = ops.linear(x, quantised_weights.pack_blocks(raw, "Q4_1", dynamic=False)).double() - exact
    coarse = x.bfloat16().double() @ weight.double().T - exact
    assert fine.abs().mean() < coarse.abs().mean() / 10


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dynamic", [True, False])
def test_the_largest_of_a_wide_product(threads, dynamic):
    raw, _ = blocks("Q8_0", randn(0, 1003, 64))
    raw = raw[torch.arange(5003) % 1003]  # each column again and again: ties
    layer = quantised_weights.pack_blocks(raw, "Q8_0", dynamic=dynamic)
    x = randn(1, 70, 64)
    x[3, 5], x[69, 40], x[8] = torch.nan, torch.inf, 0.0
    ops.set_threads(threads)
    for rows in (1, 2, 8, 9, 70):
        found, whole = ops.largest_linear(x[:rows], layer), ops.linear(x[:rows], layer)
        sound = torch.isfinite(whole).all(1)
        assert torch.equal(torch.isfinite(found.value), sound)
        assert torch.equal(found.value[sound], whole.amax(1)[sound])
        assert torch.equal(found.column[sound], whole.argmax(1)[sound])
        assert found.column[sound].max() < 1003


@pytest.mark.parametrize("level", [WITHOUT_AMX, "avx512", "avx2", "x86-64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(
    columns=st.integers(1, 200),
    width=st.integers(1, 700),
    rows=st.integers(1, 90),
    some=st.integers(1, 90),
    numbers=st.sampled_from(["integers", "FP8 of rows", "FP8 in blocks"]),
    threads=st.integers(1, 3),
)
@settings(deadline=None, max_examples=20)
def test_stored_bytes_of_any_shape(level, dtype, columns, width, rows, some, numbers, threads):
    """Sums are scaled in fp32, an odd width is no exception, and a row has the same bits in every company."""
    groups = -(-width // 128) if numbers == "FP8 in blocks" else 1
    seeded = generator(columns * width + rows)
    codes = torch.randint(0, 256, (columns, width), dtype=torch.uint8, generator=seeded)
    codes[(codes & 127) == 127] = 1
    scales = torch.rand(columns, groups, generator=seeded) * 1e-3
    form, kind = (Format.WIDENED, torch.int8) if numbers == "integers" else (Format.FLOAT8, torch.float8_e4m3fn)
    weight = codes.view(kind).float() * (scales.repeat_interleave(128, 1)[:, :width] if groups > 1 else scales)
    kernels = Kernels(load_level(level))
    packed = kernels.quantised.pack_bytes([codes], (columns, width), form, scales, None)
    x = randn(rows, rows, width, dtype=dtype)
    ops.set_threads(threads)
    whole = kernels.quantised.linear(x, packed, torch.float32)
    assert_near(whole, x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T)
    few = min(some, rows)
    assert torch.equal(kernels.quantised.linear(x[-few:].clone(), packed, torch.float32), whole[-few:])


@pytest.mark.parametrize("level", [None, WITHOUT_AMX, "avx512", "avx2"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float8_is_not_rounded_again(level, groups, dtype):
    """Every byte of E4M3 that is a number, with scales of rows or of 128 inputs, at every level of instructions.

    With AMX the numbers are scaled first and rounded to bf16, as those of a plain weight are. Whatever the level, a row
    has the same bits in every company.
    """
    columns, width = 70, 320
    codes = torch.arange(columns * width).mul(7).remainder(256).to(torch.uint8).view(columns, width)
    codes[(codes & 127) == 127] = 1
    scales = torch.rand(columns, groups, generator=torch.Generator().manual_seed(groups)) * 1e-3
    wide = scales.repeat_interleave(128, 1)[:, :width] if groups > 1 else scales
    weight = codes.view(torch.float8_e4m3fn).float() * wide
    bias = randn(2, columns)
    kernels = Kernels(load_level(level)) if level else ops.native_kernels()
    packed = kernels.quantised.pack_bytes([codes[:32], codes[32:]], (columns, width), Format.FLOAT8, scales, bias)
    ids = torch.tensor([0, 69, 33])
    assert torch.equal(kernels.quantised.rows(packed, ids), weight[ids])
    x = randn(1, 40, width, dtype=dtype)
    expected, magnitudes = x.double() @ weight.double().T + bias, x.double().abs() @ weight.double().abs().T
    whole = kernels.quantised.linear(x, packed, torch.float32)
    if level is None and dtype is torch.bfloat16:  # perhaps with AMX
        assert ((whole - expected).abs() <= 2**-8 * magnitudes + 1e-6).all()
    else:
        assert_near(whole, expected, magnitudes)
    for tokens in (1, 5, 7, 13, 24):
        assert torch.equal(kernels.quantised.linear(x[-tokens:].clone(), packed, torch.float32), whole[-tokens:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("level", [None, WITHOUT_AMX, "avx512", "avx2"])
def test_stored_bytes_are_not_rounded_again(level, dtype):
    """All bytes, -128 too, at every level of instructions."""
    codes = torch.arange(40 * 96).mul(7).remainder(256).to(torch.uint8).view(40, 96)
    scales = torch.rand(40, 1, generator=torch.Generator().manual_seed(1)) * 0.01
    kernels = Kernels(load_level(level)) if level else ops.native_kernels()
    packed = kernels.quantised.pack_bytes([codes[:32], codes[32:]], (40, 96), Format.WIDENED, scales, None)
    weight = codes.view(torch.int8).float() * scales
    assert torch.equal(kernels.quantised.rows(packed, torch.arange(40)), weight)
    for tokens in (1, 7, 40):
        x = randn(tokens, tokens, 96, dtype=dtype)
        expected, magnitudes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        assert_near(kernels.quantised.linear(x, packed, torch.float32), expected, magnitudes)


@pytest.mark.parametrize("level", [None, WITHOUT_AMX, "avx512", "avx2"])
def test_stored_integers_times_rounded_rows_are_summed_exactly(level):
    """All bytes, -128 too, at every level of instructions; x is rounded as for weights that are quantised here."""
    columns, width = 70, 320
    codes = torch.arange(columns * width).mul(7).remainder(256).to(torch.uint8).view(columns, width)
    scales = torch.rand(columns, 1, generator=generator(3)) * 1e-2
    kernels = Kernels(load_level(level)) if level else ops.native_kernels()
    packed = kernels.quantised.pack_bytes([codes[:32], codes[32:]], (columns, width), Format.CHANNELS, scales, None)
    weight = codes.view(torch.int8).float() * scales
    assert torch.equal(kernels.quantised.rows(packed, torch.arange(columns)), weight)
    for tokens in (1, 7, 40):
        x = with_outliers(randn(tokens, tokens, width).bfloat16(), 0.01)
        expected = quantised_reference.linear_rows(x, weight)
        assert_near(
            kernels.quantised.linear(x, packed, torch.float32), expected, x.double().abs() @ weight.double().abs().T
        )
