"""The LoRA op in plain torch, computed in fp32: the tests' oracle, and the path of devices without a kernel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .layouts.lora_arguments import Factors, Segments, SlotTable, unpack_expansion


def lora_shrink_expand(
    y: Tensor, x: Tensor | None, token_ids: Tensor | None, table: SlotTable, segments: Segments
) -> None:
    """``y[t] = gain * (y[t] + B (scale * A x[t])) + add`` for the tokens of each segment, with its slot's factors.

    Args:
        y: [T, sum of sizes], changed in place.
        x: [T, K]; None for an embedding.
        token_ids: [T] int64 for an embedding, where A x is the token's column of A; else None.
        table: the factors of each slot.
        segments: the tokens of each slot.

    Raises:
        ValueError: the segments have only tiles, and no slots.
    """
    segments.check_slots()
    starts = segments.starts.tolist()
    for index, slot in enumerate(segments.slots.tolist()):
        adapter = table.factors[slot]
        if adapter is None:
            continue
        tokens = segments.tokens[starts[index] : starts[index + 1]].long()
        if token_ids is None:
            assert x is not None
            shrunk = x[tokens].float() @ adapter.a.float().T
        else:
            shrunk = adapter.a[token_ids[tokens]].float()
        y[tokens] = _expand(y[tokens], shrunk * adapter.scale, adapter, table.sizes)


def expert_shrink_expand(
    y: Tensor, x: Tensor, experts: Tensor, table: SlotTable, num_experts: int, segments: Segments
) -> None:
    """Add adapters' products to those of the experts that each token picks, like `lora_shrink_expand`.

    The factors of an adapter for an expert are in slot ``slot * num_experts + expert`` of the table.

    Args:
        y: [T, k, sum of sizes], changed in place.
        x: [T, K] or [T, k, K].
        experts: [T, k] int32.
        table: [slots * num_experts].
        num_experts: E.
        segments: the tokens of each adapter's slot.
    """
    segments.check_slots()
    picks, starts = experts.shape[1], segments.starts.tolist()
    own = x.repeat_interleave(picks, 0) if x.dim() == 2 else x.flatten(0, 1)
    flat = y.flatten(0, 1)
    for index, slot in enumerate(segments.slots.tolist()):
        tokens = segments.tokens[starts[index] : starts[index + 1]].long()
        pick = (tokens[:, None] * picks + torch.arange(picks, device=y.device)).flatten()
        chosen = experts.flatten()[pick]
        for expert in chosen.unique().tolist():
            part = pick[chosen == expert].int()
            slots, ends = part.new_tensor([slot * num_experts + expert]), part.new_tensor([0, len(part)])
            lora_shrink_expand(flat, own, None, table, Segments(part, slots, ends))
    y.copy_(flat.view_as(y))


def head_shrink_expand(y: Tensor, x: Tensor, table: SlotTable, num_heads: int, segments: Segments) -> None:
    """Add adapters' products to those of each head, as `lora_shrink_expand`.

    The factors of an adapter for a head are in slot ``slot * num_heads + head`` of the table.

    Args:
        y: [T, H * (sum of sizes + more)], changed in place.
        x: [T, H * (K + more)].
    """
    own = x.unflatten(1, (num_heads, -1))[..., : table.width].contiguous()
    heads = y.flatten(1).unflatten(1, (num_heads, -1))[..., : sum(table.sizes)]
    result = heads.contiguous()
    experts = torch.arange(num_heads, dtype=torch.int32, device=y.device).expand(len(x), -1)
    expert_shrink_expand(result, own, experts, table, num_heads, segments)
    heads.copy_(result)


def _expand(y: Tensor, shrunk: Tensor, adapter: Factors, sizes: Sequence[int]) -> Tensor:
    """Return the new values of y [n, N] from the scaled A x [n, R], module by module; rank 0 changes nothing."""
    out = list(y.split(tuple(sizes), dim=1))
    ends = list(itertools.accumulate(sizes))
    ranks = shrunk.split(adapter.ranks, dim=1)
    packed = adapter.b.split([rank * size for rank, size in zip(adapter.ranks, sizes, strict=True)])
    for index, (size, rank) in enumerate(zip(sizes, adapter.ranks, strict=True)):
        if not rank:
            continue
        matrix = unpack_expansion(packed[index], size, rank)
        columns = slice(ends[index] - size, ends[index])
        value = out[index].float() + ranks[index] @ matrix.float().T
        if adapter.gain is not None:
            value = value * adapter.gain[columns]
        if adapter.add is not None:
            value = value + adapter.add[columns]
        out[index] = value.to(y.dtype)
    return torch.cat(out, dim=1)
