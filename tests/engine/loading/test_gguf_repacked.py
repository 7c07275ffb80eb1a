"""GGUF's ternary and grid types in blocks of K-quants, against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from rootgraft.engine.loading.gguf_repacked import are_exact, kept_as, kept_bytes, repacked_rows
from rootgraft.kernels import ops, quantised_weights
from rootgraft.kernels.quantised_weights import BLOCK_SIZES

FACTORS = {"TQ1_0": 52, "TQ2_0": 64, "IQ1_S": 0, "IQ3_S": 0, "IQ3_XXS": 0, "IQ1_M": None}
GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S")
ROWS, BLOCKS = 5, 3


def random_rows(name: str) -> Tensor:
    """Rows of random bytes whose factors are usual numbers."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    draw = torch.Generator().manual_seed(len(name))
    raw = torch.randint(256, (ROWS, BLOCKS, size), dtype=torch.uint8, generator=draw)
    factor = torch.randn(ROWS, BLOCKS, 1, generator=draw).half().view(torch.uint8)
    if (at := FACTORS.get(name, 0)) is not None:
        raw[..., at : at + 2] = factor
    else:  # its bits are the top four of each word of scales
        nibbles = torch.stack((factor & 15, factor >> 4), dim=-1).flatten(-2)
        raw[..., 49::2] = raw[..., 49::2] & 15 | nibbles << 4
    return raw.flatten(1)


def meaning(name: str, rows: Tensor) -> Tensor:
    found = gguf.quants.dequantize(np.ascontiguousarray(rows.numpy()), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(found.copy())


@pytest.mark.parametrize("name", FACTORS)
def test_the_other_blocks_hold_the_same_numbers(name: str) -> None:
    rows, other = random_rows(name), kept_as(name)
    assert other is not None and are_exact(name, rows)
    repacked = repacked_rows(rows, name)
    assert repacked.numel() == kept_bytes(name, rows.numel()) == ROWS * BLOCKS * BLOCK_SIZES[other][1]
    assert torch.equal(meaning(other, repacked), meaning(name, rows))
    assert repacked.numel() * 2.4 < ROWS * BLOCKS * 512  # of bytes in bfloat16


@pytest.mark.skipif(not quantised_weights.available(), reason="no compiler")
@pytest.mark.parametrize("name", GRIDS)
def test_values_of_grids_are_chosen_by_three_bits(name: str) -> None:
    """In 3.6 bits of each, whatever the factor is; products have the bits of the widened matrix."""
    rows = random_rows(name)
    rows[1, :2] = torch.tensor([2.0**-24]).half().view(torch.uint8)
    assert kept_as(name) == "IQ2" and are_exact(name, rows)
    repacked = repacked_rows(rows, name)
    assert repacked.numel() == kept_bytes(name, rows.numel()) == ROWS * BLOCKS * 110
    layer = quantised_weights.pack_blocks(repacked, "IQ2", widened=True)
    meant = meaning(name, rows)
    assert torch.equal(quantised_weights.rows(layer, torch.arange(ROWS)), meant)
    for dtype, count in ((torch.float32, 3), (torch.bfloat16, 1), (torch.bfloat16, 40)):
        x = torch.randn(count, meant.shape[1], generator=torch.Generator().manual_seed(count)).to(dtype)
        assert torch.equal(ops.linear(x, layer), ops.linear(x, ops.pack_linear(meant.to(dtype))))


@pytest.mark.parametrize("factor", [2.0**-24, float("inf"), float("nan"), 48000.0])
def test_factors_that_would_be_other_numbers_are_told(factor: float) -> None:
    rows = random_rows("IQ1_S")
    rows[1, :2] = torch.tensor([factor]).half().view(torch.uint8)
    assert not are_exact("IQ1_S", rows)


def test_types_that_are_kept_by_none_other() -> None:
    assert [kept_as(name) for name in ("Q2_K", "Q4_K", "F16")] == [None] * 3
