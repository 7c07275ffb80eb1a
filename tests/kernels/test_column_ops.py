"""Columns in another order and gates, against torch's own indexing and sigmoid."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats
from torch.nn import functional

from rootgraft.kernels.column_ops import ColumnRuns, output_gate, take_columns

# Native kernels take the first two, plain torch the last.
TYPES = (torch.float32, torch.bfloat16, torch.float16)
RUNS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6)


@settings(max_examples=repeats(60), deadline=None)
@given(RUNS, st.integers(0, 5), st.sampled_from(TYPES))
def test_columns_are_those_of_indexing(runs: list[tuple[int, int, int]], tokens: int, dtype: torch.dtype) -> None:
    first = torch.arange(tokens * 18).view(tokens, 18).to(dtype)
    matrices = [first, -first]
    expected = torch.cat([matrices[index][:, first : first + count] for index, first, count in runs], dim=1)
    assert torch.equal(take_columns(ColumnRuns.of(runs), *matrices), expected)


@settings(max_examples=repeats(40), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(1, 40)), min_size=1), st.sampled_from(TYPES)
)
def test_columns_times_factors_are_rounded_once(runs: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
    first = torch.randn(3, 50, generator=torch.Generator().manual_seed(len(runs))).to(dtype)
    factors = [0.3 + 0.7 * index for index in range(len(runs))]
    scaled = ColumnRuns.of(runs, factors=factors)
    wide = [(first.float(), -first.float())[matrix][:, at : at + count] for matrix, at, count in runs]
    expected = torch.cat([part * torch.tensor(factor) for part, factor in zip(wide, factors, strict=True)], dim=1)
    assert torch.equal(take_columns(scaled, first, -first), expected.to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_second_row_is_that_of_all_tokens(dtype: torch.dtype, tokens: int) -> None:
    first = torch.arange(tokens * 20).view(tokens, 20).to(dtype)
    row = torch.arange(100, 120).to(dtype)
    runs = [(1, 0, 16), (0, 2, 18), (1, 3, 1)]
    expected = torch.cat([row[:16].expand(tokens, -1), first[:, 2:], row[3:4].expand(tokens, -1)], dim=1)
    assert torch.equal(take_columns(ColumnRuns.of(runs), first, row), expected)
    scaled = take_columns(ColumnRuns.of(runs, factors=[2.0, 1.0, 1.0]), first, row)
    assert torch.equal(scaled, torch.cat([2 * expected[:, :16], expected[:, 16:]], dim=1))


def test_as_many_factors_as_runs() -> None:
    with pytest.raises(ValueError, match="2 runs of columns need as many factors, not 1"):
        ColumnRuns.of([(0, 0, 1), (0, 1, 1)], factors=[2.0])


@pytest.mark.parametrize("dtype", TYPES)
def test_missing_columns_are_refused(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 8, dtype=dtype)
    assert take_columns(ColumnRuns.of([(0, 3, 5)]), x).shape == (2, 5)
    for runs in ([(0, 4, 5)], [(0, 0, 1), (1, 0, 1)]):
        with pytest.raises(ValueError, match="lack"):
            take_columns(ColumnRuns.of(runs), x)
    for runs in ([(2, 0, 1)], [(0, -1, 1)], [(0, 0, 0)]):
        with pytest.raises(ValueError, match="runs of columns"):
            ColumnRuns.of(runs)


@pytest.mark.parametrize("width", [16, 48, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_of_columns_beside_others(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x, gate = (torch.randn(7, columns, generator=generator).to(dtype) for columns in (width, width + 9))
    expected = x.double() * gate[:, 5 : 5 + width].double().sigmoid()
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(output_gate(x, gate, 5).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("repeat", [16, 48, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_for_each_head(dtype: torch.dtype, repeat: int) -> None:
    generator = torch.Generator().manual_seed(repeat)
    x, gate = (torch.randn(7, columns, generator=generator).to(dtype) for columns in (3 * repeat, 8))
    expected = x.double() * gate[:, 5:].double().sigmoid().repeat_interleave(repeat, dim=1)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(output_gate(x, gate, 5, repeat).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("repeat", [1, 16, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_by_its_softplus(dtype: torch.dtype, repeat: int) -> None:
    generator = torch.Generator().manual_seed(repeat)
    x = torch.randn(7, 16 * repeat, generator=generator).to(dtype)
    gate = (torch.randn(7, 20, generator=generator) * 8).to(dtype)
    gate[:3, 5] = torch.tensor([-90.0, 0.0, 90.0], dtype=dtype)
    expected = x.double() * functional.softplus(gate[:, 3:19].double()).repeat_interleave(repeat, dim=1)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    found = output_gate(x, gate, 3, repeat, is_softplus=True).double()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
