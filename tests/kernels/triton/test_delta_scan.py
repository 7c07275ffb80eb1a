"""The GPU's gated delta rule, interpreted, against the oracle."""

from __future__ import annotations

import pytest
import torch
from support.kernels.ragged_batches import assert_close
from support.kernels.state_cases import random_state, state_batch

from rootgraft.kernels import state_ops, state_reference
from rootgraft.kernels.layouts.state_arguments import DeltaParams
from rootgraft.kernels.triton import delta_scan

pytestmark = pytest.mark.usefixtures("interpreted")


def params_of(
    heads: int,
    dim: int,
    key_heads: int,
    size: int,
    *,
    by_channel: bool = False,
    factor: float = 1.0,
    bound: float | None = None,
) -> DeltaParams:
    decay, bias = torch.rand(heads), torch.rand(heads * (size if by_channel else 1))
    return DeltaParams(heads, dim, key_heads, size, -decay, bias, by_channel, factor, bound)


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "key_heads", "size", "by_channel", "factor", "bound"),
    [
        *((torch.float32, 2, 24, 1, 40, False, 2.0, None), (torch.float32, 2, 16, 2, 16, False, 1.0, None)),
        *((torch.bfloat16, 2, 16, 1, 32, False, 1.0, None), (torch.float32, 2, 24, 1, 40, True, 1.0, None)),
        (torch.float32, 2, 24, 2, 40, True, 1.0, -5.0),
    ],
)
def test_results_and_states(dtype, heads, dim, key_heads, size, by_channel, factor, bound) -> None:
    """Token by token and in chunks, which end where a state is kept."""
    torch.manual_seed(heads + dim)
    params = params_of(heads, dim, key_heads, size, by_channel=by_channel, factor=factor, bound=bound)
    batch = state_batch()
    tokens = len(batch.checkpoints)
    x, gates = torch.randn(tokens, params.columns).to(dtype), torch.randn(tokens, 3 + params.steps + heads).to(dtype)
    state, where = random_state(heads, size, dim), (3, 3 + params.steps)
    expected_state = state.clone()
    assert delta_scan.takes(x, gates, state, batch, params)
    found = state_ops.delta_scan(x, gates, where, state, batch, params)
    assert_close(found, state_reference.delta_scan(x, gates, where, expected_state, batch, params))
    tolerance = 1e-4 if dtype is torch.float32 else 1e-3
    torch.testing.assert_close(state[:-1], expected_state[:-1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_keys_that_are_all_alike(factor: float) -> None:
    """A token many times over, which the state forgets little of: the worst case of the triangular system."""
    torch.manual_seed(1)
    params, batch = params_of(1, 16, 1, 16, factor=factor), state_batch([96], [-1], [0])
    params.decay.fill_(-1e-4)
    x = torch.randn(1, params.columns).expand(96, -1) + 1e-3 * torch.randn(96, params.columns)
    gates = torch.tensor([-3.0, 8.0]).expand(96, 2).contiguous()
    state, expected_state = random_state(1, 16, 16), random_state(1, 16, 16)
    found = delta_scan.delta_scan(x, gates, (0, 1), state, batch, params)
    assert_close(found, state_reference.delta_scan(x, gates, (0, 1), expected_state, batch, params))
    torch.testing.assert_close(state[0], expected_state[0], rtol=1e-4, atol=1e-4)


def test_keys_without_length() -> None:
    params, batch = params_of(1, 16, 1, 16), state_batch([20], [-1], [0])
    x, gates = torch.zeros(20, params.columns), torch.zeros(20, 2)
    state = random_state(1, 16, 16)
    assert (delta_scan.delta_scan(x, gates, (0, 1), state, batch, params) == 0).all()
    assert (state[0] == 0).all()
