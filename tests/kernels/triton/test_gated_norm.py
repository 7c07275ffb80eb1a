"""The GPU's norm with a gate, interpreted, against the oracle."""

from __future__ import annotations

import pytest
import torch
from support.kernels.ragged_batches import assert_close

from rootgraft.kernels import state_ops, state_reference
from rootgraft.kernels.layouts.state_arguments import GatedNormParams
from rootgraft.kernels.triton import gated_norm

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "groups", "group", "first", "is_norm_first"),
    [(3, 2, 24, 8, False), (5, 48, 128, 0, True), (2, 1, 2080, 16, True)],
)
def test_gated_norm(dtype, tokens, groups, group, first, is_norm_first) -> None:
    torch.manual_seed(group)
    width = groups * group
    x, gate = torch.randn(tokens, width).to(dtype), (9 * torch.randn(tokens, first + width + 8)).to(dtype)
    params = GatedNormParams(torch.randn(width).to(dtype), 1e-5, groups, is_norm_first)
    assert gated_norm.takes(x, gate, params)
    assert_close(state_ops.gated_norm(x, gate, params, first), state_reference.gated_norm(x, gate, params, first))


def test_a_gate_that_is_shut() -> None:
    """Its sigmoid underflows to 0, and no infinity times 0 comes of it."""
    x, gate = torch.randn(1, 16), torch.full((1, 16), -1e4)
    params = GatedNormParams(torch.ones(16), 1e-5, 1, True)
    assert (gated_norm.gated_norm(x, gate, params, 0) == 0).all()
