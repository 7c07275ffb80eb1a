"""The GPU's selective scan of single channels, interpreted, against the oracle."""

from __future__ import annotations

import pytest
import torch
from support.kernels.ragged_batches import assert_close
from support.kernels.state_cases import random_state, state_batch
from torch import Tensor

from rootgraft.kernels import state_ops, state_reference
from rootgraft.kernels.layouts.state_arguments import SelectiveParams
from rootgraft.kernels.triton import selective_scan

pytestmark = pytest.mark.usefixtures("interpreted")


def case_of(tokens: int, width: int, size: int, dtype: torch.dtype) -> tuple[SelectiveParams, list[Tensor]]:
    torch.manual_seed(width + size)
    params = SelectiveParams(-torch.rand(size, width), torch.randn(width), torch.rand(width))
    return params, [torch.randn(tokens, columns).to(dtype) for columns in (width, width, 2 * size)]


@pytest.mark.parametrize(
    ("dtype", "width", "size"), [(torch.float32, 24, 40), (torch.float32, 600, 16), (torch.bfloat16, 48, 16)]
)
def test_results_and_states(dtype: torch.dtype, width: int, size: int) -> None:
    """Of several programs for the channels of a row; states are kept in the middle of rows too."""
    batch = state_batch()
    params, inputs = case_of(len(batch.checkpoints), width, size, dtype)
    state = random_state(1, size, width)
    expected_state = state.clone()
    assert selective_scan.takes(*inputs, state, batch, params)
    found = state_ops.selective_scan(*inputs, state, batch, params)
    assert_close(found, state_reference.selective_scan(*inputs, expected_state, batch, params))
    tolerance = 1e-4 if dtype is torch.float32 else 1e-3
    torch.testing.assert_close(state[:-1], expected_state[:-1], rtol=tolerance, atol=tolerance)


def test_larger_states_are_not_taken() -> None:
    batch = state_batch([1], [-1], [0])
    params, inputs = case_of(1, 16, 272, torch.float32)
    assert not selective_scan.takes(*inputs, random_state(1, 272, 16), batch, params)
