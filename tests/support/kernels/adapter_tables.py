"""Random factors of adapters for the GPU's low-rank kernels, in memory that interpreted kernels may reach."""

from __future__ import annotations

import torch

from rootgraft.kernels.lora_ops import Factors, SlotTable
from support.kernels import triton_interpreter

Ranks = list[tuple[int, ...] | None]


def random_factors(
    sizes: tuple[int, ...], width: int, ranks: tuple[int, ...], dtype: torch.dtype, seed: int, *, embed: bool = False
) -> Factors:
    """Random factors that kernels may reach; with a gain, an addend, both or neither, by the seed."""
    g = torch.Generator().manual_seed(seed)
    total = sum(ranks)
    cells = sum(rank * size for rank, size in zip(ranks, sizes, strict=True))
    made = Factors(
        a=torch.randn((width, total) if embed else (total, width), generator=g).to(dtype),
        scale=torch.rand(total, generator=g) / total,
        ranks=ranks,
        b=torch.randn(cells, generator=g).to(dtype),
        gain=torch.rand(sum(sizes), generator=g) if seed % 2 else None,
        add=torch.randn(sum(sizes), generator=g) if seed // 2 % 2 else None,
    )
    triton_interpreter.allow(*made.tensors())
    return made


def random_table(sizes: tuple[int, ...], width: int, all_ranks: Ranks, dtype: torch.dtype) -> SlotTable:
    """A table whose slot s has ``all_ranks[s]``, or is empty."""
    table = SlotTable(sizes, width, len(all_ranks), dtype)
    for slot, ranks in enumerate(all_ranks):
        table.put(slot, None if ranks is None else random_factors(sizes, width, ranks, dtype, slot))
    return table
