"""The GPU's attention, interpreted, against the oracle: ragged batches, edges, windows, caps, shared prefixes."""

from __future__ import annotations

import pytest
import torch
from ragged_batches import assert_close, ragged_batch

from kernels.triton import attention

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "page_size"),
    [
        ([(1, 1), (1, 16), (1, 17), (1, 150)], 4, 2, 64, 16),
        ([(1, 300)], 6, 1, 128, 1),
        ([(5, 5), (1, 40), (70, 100), (2, 33)], 3, 1, 64, 16),
    ],
)
def test_attention(dtype, rows, heads, kv_heads, head_dim, page_size):
    batch = ragged_batch(rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype)
    assert attention.takes(*batch.args[:4])
    out = attention.attention(*batch.args, scale=head_dim**-0.5)
    assert_close(out, batch.expected(scale=head_dim**-0.5))
