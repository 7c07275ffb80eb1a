"""Triton LoRA op on products of experts and heads. The picks of a step are grouped by adapter and expert.

    segments        slot 0: tokens 9 10 | slot 2: token 0      with the experts (3 1), (1 2) and (3 1)
    keys of picks   slot * E + expert                          3 1  1 2 | 2 E + 3  2 E + 1
    groups          picks sorted by key                        1 1 | 2 | 3 | 2 E + 1 | 2 E + 3

A pick is one of the k experts of a token. Grouping uses a few torch ops with fixed shapes, so nothing is read back to
the host: there is room for one incomplete tile of each key and for all whole tiles, and unused tiles are empty. Pick j
of token t is row ``t * k + j`` of the results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layouts.lora_arguments import Segments, SlotTable, Tiles
from . import lora_kernels
from .launch import cdiv
from .lora_config import LONG, SHORT


def shrink_expand(
    y: Tensor, x: Tensor, experts: Tensor, table: SlotTable, num_experts: int, segments: Segments
) -> None:
    """``kernels.lora_reference.expert_shrink_expand`` for segments with tiles."""
    num_keys, num_picks = table.rows.shape[0], experts.shape[1]
    keys, picks = _keyed(experts, num_experts, num_keys, segments)
    keys, order = keys.sort(stable=True)
    picks = picks[order]
    tiles = _tiles(keys, num_keys)
    rows = picks if x.dim() == 3 else picks // num_picks
    lora_kernels.shrink_expand_rows(y.flatten(0, 1), x.reshape(-1, x.shape[-1]), table, rows, picks, tiles)


def head_shrink_expand(y: Tensor, x: Tensor, table: SlotTable, num_heads: int, segments: Segments) -> None:
    """``kernels.lora_reference.head_shrink_expand`` for segments with tiles: a token has each head as an expert."""
    own = x.unflatten(1, (num_heads, -1))[..., : table.width].contiguous()
    heads = y.flatten(1).unflatten(1, (num_heads, -1))[..., : sum(table.sizes)]
    result = heads.contiguous()
    experts = torch.arange(num_heads, dtype=torch.int32, device=y.device).expand(len(x), -1)
    shrink_expand(result, own, experts, table, num_heads, segments)
    heads.copy_(result)


def _keyed(experts: Tensor, num_experts: int, num_keys: int, segments: Segments) -> tuple[Tensor, Tensor]:
    """Return key and number of each pick of the segments' tokens, [S * k] int32; key ``num_keys`` for no adapter."""
    assert segments.tiles is not None
    lines, tokens = segments.tiles.lines.long(), segments.tokens.long()
    slot, first, end = lines.unbind(1)
    places = torch.arange(len(tokens), device=tokens.device)
    # Tiles are in the order of their tokens: the tile of a token is the last one that begins at or before it.
    numbers = torch.arange(len(lines), device=tokens.device)
    marks = torch.zeros(len(tokens) + 1, dtype=torch.int64, device=tokens.device)
    marks.scatter_(0, torch.where(first < end, first, len(tokens)), numbers)
    tile = marks[:-1].cummax(0).values
    is_adapted = (places >= first[tile]) & (places < end[tile])
    chosen = experts[tokens].long()
    keys = torch.where(is_adapted[:, None], slot[tile][:, None] * num_experts + chosen, num_keys)
    picks = tokens[:, None] * experts.shape[1] + torch.arange(experts.shape[1], device=tokens.device)
    return keys.flatten().int(), picks.flatten().int()


def _tiles(keys: Tensor, num_keys: int) -> Tiles:
    """Cut sorted keys into tiles of one key each; picks without a key are in none."""
    count = len(keys)
    size = LONG if count >= LONG * num_keys else SHORT
    most = min(count, num_keys + cdiv(count, size))
    places = torch.arange(count, device=keys.device)
    has_key = keys < num_keys
    is_first = torch.ones_like(has_key)
    is_first[1:] = keys[1:] != keys[:-1]
    group_start = torch.where(is_first, places, 0).cummax(0).values
    begins = has_key & ((places - group_start) % size == 0)
    number = torch.where(begins, begins.cumsum(0) - 1, most + 1)
    starts = has_key.sum().expand(most + 2).clone()  # tiles that are not needed start at the end of all
    starts.scatter_(0, number, places)
    first, end = starts[:most], starts[1 : most + 1]
    slots = keys[first.clamp(max=count - 1)].clamp(max=num_keys - 1)
    return Tiles(torch.stack((slots.long(), first, end), dim=1).int(), size)
