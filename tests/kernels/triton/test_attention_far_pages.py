"""Cells of KV whose offsets exceed 32 bits, in memory that is committed only where it is written, interpreted."""

from __future__ import annotations

import pytest
import torch

from rootgraft.kernels import latent_ops, memory, ops
from rootgraft.kernels.layouts import int8_kv_layout, kv_forms
from rootgraft.kernels.layouts.attention_arguments import LatentParams

pytestmark = pytest.mark.usefixtures("interpreted")

TOKENS = torch.arange(40)
PAGE = 16


def table_of(num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three of the last pages for 40 tokens, and the tokens' cells."""
    pages = torch.tensor([[num_pages - 3, num_pages - 1, num_pages - 6]], dtype=torch.int32)
    return pages, (pages[0, TOKENS // PAGE] * PAGE).long() + TOKENS % PAGE


def both_steps(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, **options: int) -> torch.Tensor:
    """Attention of all tokens as one row, and of the last one alone."""
    found = []
    for first in (0, 39):
        ends = (torch.tensor(each, dtype=torch.int32) for each in ([0, 40 - first], [40]))
        batch = ops.PagedBatch(pages, *ends, 40 - first, 40)
        found.append(ops.attention(q[first:], k, v, batch, ops.AttentionParams(0.1, **options)))
    return torch.cat(found)


@pytest.mark.parametrize("kind", [torch.bfloat16, kv_forms.FLOAT8], ids=str)
def test_pages_beyond_32_bits(kind: torch.dtype) -> None:
    """Of numbers, not of bytes; pages are copied too."""
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(40, 6 * 128, generator=generator).bfloat16()
    width = 128 + (int8_kv_layout.SCALE_BYTES if kind.itemsize == 1 else 0)
    found = []
    for num_pages in (8, (1 << 31) // (2 * PAGE * width) + 9):
        k, v = (memory.lazy_zeros((num_pages, 2, PAGE, width), kind) for _ in range(2))
        pages, cells = table_of(num_pages)
        q = ops.rope_store_kv(qkv, TOKENS, cells, k, v, ops.RopeParams(2, 2))
        memory.copy_pages(k[None], v[None], [num_pages - 3], [num_pages - 2], [PAGE])
        pages[0, 0] += 1
        found.append(both_steps(q, k, v, pages))
    assert found[0].isfinite().all() and torch.equal(*found)


def test_latent_pages_beyond_32_bits() -> None:
    generator = torch.Generator().manual_seed(2)
    q, kv = (torch.randn(40, size, generator=generator).bfloat16() for size in (2 * (64 + 16), 64 + 16))
    angles = torch.randn(64, 16, generator=generator)
    params = LatentParams(2, 64, 16, angles, torch.ones(64).bfloat16(), 1e-6, is_interleaved=False)
    found = []
    for num_pages in (8, (1 << 31) // (PAGE * 80) + 9):
        cache = memory.lazy_zeros((num_pages, 1, PAGE, 80), torch.bfloat16)
        pages, cells = table_of(num_pages)
        queries = q.clone()
        latent_ops.rope_store_latent(queries, kv, TOKENS, cells, cache, params)
        found.append(both_steps(queries.view(40, 2, 80), cache, cache, pages, value_dim=64))
    assert found[0].isfinite().all() and torch.equal(*found)
