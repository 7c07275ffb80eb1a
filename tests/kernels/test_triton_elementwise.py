"""The GPU's kernels for norms, rotation, activation and copies, interpreted, against the oracle."""

from __future__ import annotations

import pytest
import torch
from ragged_batches import assert_close

from kernels import reference
from kernels.triton import activation

pytestmark = pytest.mark.usefixtures("interpreted")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", activation.KINDS)
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (3, 1040), (0, 16)])
def test_gated_activation(dtype, kind, tokens, width):
    x = (torch.randn(tokens, 2 * width) * torch.tensor([30.0, 1.0]).repeat_interleave(width)).to(dtype)
    assert activation.takes(x)
    assert_close(activation.gated_activation(x, kind), reference.gated_activation(x, kind))
