"""Kernels compiled for ARM with NEON: recorded calls give, under an emulator, what this CPU computes."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import pytest
import torch
from support.kernels import emulated
from support.kernels.cpu_levels import BASELINE, load_level
from support.kernels.emulated import EmulatedKernels
from support.kernels.ragged_batches import RaggedBatch, ragged_batch
from torch import Tensor

from rootgraft.kernels import ops, quantised_weights
from rootgraft.kernels.backend import LIBRARY
from rootgraft.kernels.cpu.native_library import Buffers
from rootgraft.kernels.cpu.native_ops import Kernels
from rootgraft.kernels.layouts.packed_weights import Format, QuantisedLinear

pytestmark = pytest.mark.heavy
ARCHS = [
    "armv8.2-a+dotprod",
    pytest.param("armv8-a", marks=pytest.mark.sample),
    pytest.param("armv8.6-a+bf16+i8mm", marks=pytest.mark.sample),
]


@pytest.fixture(scope="module", params=ARCHS)
def neon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EmulatedKernels:
    return emulated.build(tmp_path_factory.mktemp("neon"), request.param)


@pytest.fixture(scope="module")
def baseline() -> Kernels:
    """What packs the same on every CPU: its weights are arranged for no unit that ARM lacks."""
    return Kernels(load_level(BASELINE))


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same(neon: EmulatedKernels, kernels: Kernels, run: Callable[[], Tensor], *used: Tensor) -> None:
    """Compare a call's result on this CPU with the emulated one, relative to the largest value.

    Attention over 8 bits rounds weights to as many steps as the CPU's byte products sum exactly: 127 or 255.
    """
    with kernels.library.recorded(Buffers(64)) as recording:
        expected = run()
    assert len(recording.calls) == 1
    found = neon.run(recording, [*used, expected])[-1]
    assert not torch.isnan(expected.float()).any()
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < (1e-5 if expected.dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(neon: EmulatedKernels, baseline: Kernels, rows: int, dtype: torch.dtype) -> None:
    x, bias = randn(rows, rows, 192).to(dtype), randn(2, 70)
    layer = baseline.pack_linear(randn(1, 70, 192).to(dtype), bias)
    assert_same(neon, baseline, lambda: baseline.linear(x, layer, torch.float32), x, layer.weight, layer.bias)


def quantised(kernels: Kernels, form: str, monkeypatch: pytest.MonkeyPatch) -> QuantisedLinear:
    """A weight in 8 bits by columns, or in blocks whose product is of integers (dynamic) or of widened numbers."""
    weight = randn(1, 70, 256)
    if form == "int8":
        return kernels.quantised.pack_channels(weight, Format.CHANNELS, None)
    block_type, _, product = form.partition(" ")
    raw = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[block_type])
    monkeypatch.setitem(vars(LIBRARY), "native", kernels)
    kind = {"dynamic": product == "dynamic", "widened": product == "widened"}
    return quantised_weights.pack_blocks(torch.from_numpy(raw.copy()), block_type, **kind)  # type: ignore[arg-type]


FORMS = [
    "int8",
    "Q4_0 dynamic",
    "Q4_1 dynamic",
    "Q8_0 dynamic",
    "Q4_0",
    "Q4_1",
    "Q8_0",
    "Q4_0 widened",
    "Q4_1 widened",
    "Q8_0 widened",
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 9])
def test_products_with_weights_of_4_and_8_bits(
    neon: EmulatedKernels, baseline: Kernels, monkeypatch: pytest.MonkeyPatch, form: str, rows: int
) -> None:
    layer, x = quantised(baseline, form, monkeypatch), randn(rows, rows, 256).bfloat16()
    used = [each for each in (layer.weight, layer.scales, layer.bias) if each is not None]
    assert_same(neon, baseline, lambda: baseline.quantised.linear(x, layer, torch.float32), x, *used)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_attention(neon: EmulatedKernels, baseline: Kernels, form: str) -> None:
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    batch: RaggedBatch = ragged_batch([(1, 90), (7, 300), (40, 40), (1, 1)], dtype=dtype)
    if form == "int8":
        batch = batch.in_int8()
    q, k_cache, v_cache, pages = batch.args
    params = ops.AttentionParams(scale=64**-0.5)
    used = q, k_cache, v_cache, pages.page_table, pages.query_start, pages.context_len
    assert_same(neon, baseline, lambda: baseline.attention(q, k_cache, v_cache, pages, params), *used)
