"""The GPU's convolution with a state, interpreted, against the oracle."""

from __future__ import annotations

import pytest
import torch
from support.kernels.ragged_batches import assert_close
from support.kernels.state_cases import SHORT, random_state, state_batch

from rootgraft.kernels import state_ops, state_reference
from rootgraft.kernels.layouts.state_arguments import ConvParams
from rootgraft.kernels.triton import causal_conv

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize(
    ("dtype", "taps", "gated", "biased", "width", "first"),
    [
        (torch.float32, 4, False, True, 48, 16),
        (torch.float32, 3, True, False, 48, 0),
        (torch.float32, 2, False, False, 16, 0),
        (torch.bfloat16, 4, False, False, 64, 32),
        (torch.float16, 3, True, True, 64, 0),
    ],
)
def test_results_and_states(dtype, taps, gated, biased, width, first) -> None:
    """A row that begins, one without tokens, short and long ones, kept states; one of them in the slot that is read."""
    torch.manual_seed(taps)
    batch = state_batch(SHORT)
    x = torch.randn(len(batch.checkpoints), first + (3 if gated else 1) * width + 16).to(dtype)
    params = ConvParams(torch.randn(taps, width).to(dtype), torch.randn(width).to(dtype) if biased else None, gated)
    state = random_state(taps - 1, width, dtype=dtype)
    expected_state = state.clone()
    assert causal_conv.takes(x, state, batch, params)
    found = state_ops.causal_conv(x, state, batch, params, first)
    assert_close(found, state_reference.causal_conv(x, expected_state, batch, params, first))
    assert torch.equal(state[1:-1], expected_state[1:-1]) and torch.equal(state[0], expected_state[0])


def test_channels_of_several_programs() -> None:
    batch, params = state_batch([2], [-1], [0]), ConvParams(torch.randn(2, 528), None, False)
    x, state, expected_state = torch.randn(2, 528), random_state(1, 528), random_state(1, 528)
    found = causal_conv.causal_conv(x, state, batch, params, 0)
    assert_close(found, state_reference.causal_conv(x, expected_state, batch, params, 0))
    assert torch.equal(state[0], expected_state[0])


def test_tokens_behind_the_last_row_change_nothing() -> None:
    """As those that pad a captured step."""
    params, batch = ConvParams(torch.randn(4, 16), None, False), state_batch([2, 1], [-1, 1], [0, 1])
    x, state = torch.randn(3, 16), random_state(3, 16)
    padded_state = state.clone()
    found = causal_conv.causal_conv(x, state, batch, params, 0)
    longer = state_batch([2, 1, 0, 0], [-1, 1, -1, -1], [0, 1, -1, -1])
    kept = torch.full((6,), -1, dtype=torch.int32)
    kept[:3] = batch.checkpoints
    padded = state_ops.StateBatch(longer.query_start, longer.source, longer.target, kept)
    wide = causal_conv.causal_conv(torch.cat((x, torch.full((3, 16), torch.nan))), padded_state, padded, params, 0)
    assert torch.equal(wide[:3], found) and (wide[3:] == 0).all()
    torch.testing.assert_close(padded_state, state, rtol=0, atol=0, equal_nan=True)


def test_what_is_not_taken() -> None:
    batch, params = state_batch(), ConvParams(torch.randn(9, 16), None, False)
    x = torch.randn(len(batch.checkpoints), 16)
    assert not causal_conv.takes(x, random_state(8, 16), batch, params), "more taps than are unrolled"
    narrow = ConvParams(torch.randn(4, 16).bfloat16(), None, False)
    assert not causal_conv.takes(x, random_state(3, 16), batch, narrow), "types that differ"
