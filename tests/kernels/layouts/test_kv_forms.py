"""Rows of 8 bits with a scale of each token and head, against torch's own conversions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rootgraft.kernels.layouts import int8_kv_layout, kv_forms

TOKENS, HEADS, DIM, PAGE = 12, 2, 32, 16
LARGEST = {kv_forms.INT8: 127.0, kv_forms.FLOAT8: 448.0}
ROW_DTYPES = pytest.mark.parametrize("dtype", kv_forms.ROW_DTYPES, ids=str)


def cached(
    k: Tensor, v: Tensor, dtype: torch.dtype, scales: kv_forms.StaticScales | None = None
) -> tuple[Tensor, Tensor]:
    """Write tokens to a page and read them: [T, Hkv, D] twice."""
    caches = [torch.zeros(1, HEADS, PAGE, DIM + 4, dtype=torch.uint8).view(dtype) for _ in range(2)]
    cells = torch.arange(len(k))
    kv_forms.store(caches[0], caches[1], torch.zeros_like(cells), cells, k, v, scales)
    found = kv_forms.keys(caches[0]), kv_forms.values(caches[1])
    return found[0][0, :, : len(k)].transpose(0, 1), found[1][0, :, : len(v)].transpose(0, 1)


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What torch makes of x in a type of 8 bits with a scale."""
    scaled = (x / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (scaled.round() if dtype is kv_forms.INT8 else scaled).to(dtype).float() * scale


@ROW_DTYPES
@given(seed=st.integers(0, 999), spread=st.sampled_from([0.0, 1.0, 3.0]))
def test_rows_are_what_torch_rounds_with_the_scale_of_each_token_and_head(
    dtype: torch.dtype, seed: int, spread: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(TOKENS, HEADS, DIM, generator=draw) for _ in range(2))
    k *= torch.exp(spread * torch.randn(TOKENS, HEADS, 1, generator=draw))
    for found, exact in zip(cached(k, v, dtype), (k, v), strict=True):
        scale = exact.abs().amax(-1, keepdim=True) / LARGEST[dtype]
        # A number halfway between two may be rounded to either: the scale is applied by its inverse.
        step = scale if dtype is kv_forms.INT8 else torch.maximum(exact.abs() / 8, scale / 512)
        different = (found - rounded(exact, scale, dtype)).abs() > 1e-5 * exact.abs()
        assert int(different.sum()) <= 2
        assert bool(((found - exact).abs() <= step * 0.501).all())


@pytest.mark.parametrize("dtype", [*kv_forms.ROW_DTYPES, int8_kv_layout.DTYPE], ids=str)
def test_static_scales_quantise_as_torch_does_and_saturate(dtype: torch.dtype) -> None:
    """A number is x / scale, rounded, within the range of its type; other tokens of a head have the same scale."""
    form: kv_forms.StaticForm = "fp8" if dtype is kv_forms.FLOAT8 else "int8"
    draw = torch.Generator().manual_seed(4)
    k, v = (torch.randn(TOKENS, HEADS, DIM, generator=draw).bfloat16() for _ in range(2))
    scales = torch.tensor([[0.004, 0.5], [0.003, 0.02]])  # of which some cut numbers off
    for found, exact, scale in zip(
        cached(k, v, dtype, kv_forms.StaticScales(form, scales)), (k, v), scales, strict=True
    ):
        scaled = exact.float() / scale[:, None]
        if form == "fp8":
            wanted = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        else:
            wanted = scaled.round().clamp(-128, 127)
        assert torch.equal(found, wanted * scale[:, None])
    other: kv_forms.StaticForm = "int8" if form == "fp8" else "fp8"
    of_tokens = cached(k, v, dtype)
    assert all(map(torch.equal, cached(k, v, dtype, kv_forms.StaticScales(other, scales)), of_tokens))


@ROW_DTYPES
def test_scales_of_tokens_are_nearer_than_one_of_the_checkpoint(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    k = torch.randn(TOKENS, HEADS, DIM, generator=draw) * torch.logspace(-6, 1, TOKENS)[:, None, None]
    ours = cached(k, k, dtype)[0]
    checkpoint = rounded(k, k.abs().max() / LARGEST[dtype], dtype)
    errors = [((found - k).norm(dim=-1) / k.norm(dim=-1)).max() for found in (ours, checkpoint)]
    assert 5 * errors[0] < errors[1]
