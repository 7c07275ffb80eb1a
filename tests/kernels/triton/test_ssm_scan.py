"""The GPU's selective scan, interpreted, against the oracle."""

from __future__ import annotations

import pytest
import torch
from support.kernels.ragged_batches import assert_close
from support.kernels.state_cases import random_state, state_batch

from rootgraft.kernels import state_ops, state_reference
from rootgraft.kernels.layouts.state_arguments import SsmParams
from rootgraft.kernels.triton import ssm_scan

pytestmark = pytest.mark.usefixtures("interpreted")


def params_of(heads: int, dim: int, groups: int, size: int) -> SsmParams:
    decay, bias, skip = (torch.rand(heads) for _ in range(3))
    return SsmParams(heads, dim, groups, size, -decay, bias, skip)


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "groups", "size"),
    [(torch.float32, 2, 24, 1, 40), (torch.float32, 2, 16, 2, 16), (torch.bfloat16, 2, 16, 1, 32)],
)
def test_results_and_states(dtype, heads, dim, groups, size) -> None:
    """Token by token and in chunks, which end where a state is kept."""
    torch.manual_seed(heads + dim)
    params, batch = params_of(heads, dim, groups, size), state_batch()
    tokens = len(batch.checkpoints)
    x, steps = torch.randn(tokens, params.columns).to(dtype), torch.randn(tokens, 16 + heads).to(dtype)
    state = random_state(heads, size, dim)
    expected_state = state.clone()
    assert ssm_scan.takes(x, steps, state, batch, params)
    found = state_ops.ssm_scan(x, steps, 16, state, batch, params)
    assert_close(found, state_reference.ssm_scan(x, steps, 16, expected_state, batch, params))
    tolerance = 1e-4 if dtype is torch.float32 else 1e-3
    torch.testing.assert_close(state[:-1], expected_state[:-1], rtol=tolerance, atol=tolerance)


def test_steps_of_any_size() -> None:
    """Gates that are almost shut, and such as shrink a state to nothing."""
    params, batch = params_of(1, 16, 1, 16), state_batch([40], [-1], [0])
    x, steps = torch.randn(40, params.columns), torch.linspace(-30.0, 60.0, 40)[:, None].contiguous()
    state, expected_state = random_state(1, 16, 16), random_state(1, 16, 16)
    found = ssm_scan.ssm_scan(x, steps, 0, state, batch, params)
    assert_close(found, state_reference.ssm_scan(x, steps, 0, expected_state, batch, params))
    assert_close(state[0], expected_state[0])


def test_the_launches_follow_the_longest_row() -> None:
    """Of a step of short rows, as in decoding, none is for chunks."""
    params = params_of(2, 16, 1, 16)
    x, steps, state = torch.randn(9, params.columns), torch.randn(9, 2), random_state(2, 16, 16)

    def kernels(lengths: list[int], *, known: bool) -> list[str]:
        count = len(lengths)
        batch = state_batch(lengths, [-1] * count, list(range(count)), knows_longest=known)
        made = ssm_scan._launches(x, steps, 0, state, batch, params, x)
        return [launch.kernel.__name__ for launch in made]

    assert kernels([8, 1], known=True) == ["_ssm_short"]
    assert kernels([9], known=True) == kernels([1] * 9, known=False) == ["_ssm_short", "_ssm_chunks"]


def test_larger_states_are_not_taken() -> None:
    params, batch = params_of(1, 16, 1, 272), state_batch([1], [-1], [0])
    x, steps = torch.randn(1, params.columns), torch.randn(1, 16)
    assert not ssm_scan.takes(x, steps, random_state(1, 272, 16), batch, params)
