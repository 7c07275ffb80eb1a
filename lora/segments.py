"""Segments: the tokens of a step sorted by their adapter's slot.

rows of the batch   | row 0: 5 tokens, slot 2 | row 1: 3 tokens, base | row 2: 4 tokens, slot 0 from its 2nd on |
slot of each token    2  2  2  2  2             .  .  .                 .  0  0  0
segments              slot 0: tokens 9 10 11,  slot 2: tokens 0 1 2 3 4
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernels import ops
from ..kernels.layouts.staging import refill, to_device
from ..kernels.lora_ops import Segments, Tiles
from ..kernels.triton.lora_config import MOST_PLACED, SHORT, make_places, make_tiles, tile_size

Ints = NDArray[np.int32]

BASE = -1
"""Slot of tokens without an adapter."""


def token_slots(slots: Ints, first: Ints, lengths: Ints, starts: Ints) -> Ints:
    """Return the slot of each token of a step, [T] int32.

    Args:
        slots: [R] int32, the slot of each row's adapter, ``BASE`` for none.
        first: [R] int32, position in its sequence of the first token to which the adapter applies: 0 except for
            activated LoRA.
        lengths: [R] int32, number of tokens of each row in this step.
        starts: [R] int32, position in its sequence of each row's first token.
    """
    of_tokens = np.repeat(slots, lengths)
    if not (first > starts).any():
        return of_tokens
    ends = np.cumsum(lengths)
    positions = np.arange(len(of_tokens)) + np.repeat(starts - (ends - lengths), lengths)
    of_tokens[positions < np.repeat(first, lengths)] = BASE
    return of_tokens


def make_segments(of_tokens: Ints, device: torch.device) -> Segments | None:
    """Sort the tokens of a step by slot. Returns None if no token has an adapter.

    Args:
        of_tokens: [T] int32, as from ``token_slots``.
        device: device of the result. Tiles are added for devices with tiled kernels.
    """
    tokens, slots, starts = _sorted(of_tokens)
    if not len(tokens):
        return None
    if not ops.on_triton(device):
        first, second, third = (to_device(values, device) for values in (tokens, slots, starts))
        return Segments(first, second, third)
    size = SHORT if ops.is_invariant(device) else tile_size(len(tokens), len(slots))
    tiles = make_tiles(slots, starts, size)
    parts = [tokens, slots, starts, tiles.reshape(-1)]
    if size == SHORT and len(of_tokens) <= MOST_PLACED:
        parts.append(make_places(tokens, tiles, len(of_tokens)).reshape(-1))
    on_device = to_device(np.concatenate(parts), device)
    all_tokens, all_slots, all_starts, lines, *places = on_device.split([len(part) for part in parts])
    in_tiles = Tiles(lines.view(-1, 3), size, places[0].view(-1, 3) if places else None)
    return Segments(all_tokens, all_slots, all_starts, in_tiles)


class StaticSegments:
    """Static segment buffers for recorded or captured forward passes.

    There is one segment per token at most; unused segments are empty.

    Args:
        num_tokens: largest number of tokens of a forward pass.
        device: device of the segments. For devices with tiled kernels, tiles replace slots and starts.
        num_slots: largest number of slots with tokens in a forward pass; None for ``num_tokens``.
    """

    def __init__(self, num_tokens: int, device: torch.device, num_slots: int | None = None) -> None:
        self._num_tokens = num_tokens
        self._num_slots = num_tokens if num_slots is None else num_slots
        self._tiled = ops.on_triton(device)
        self._num_placed = min(num_tokens, MOST_PLACED)
        size = 3 * num_tokens + 1
        if self._tiled:
            # Tokens, then tiles, then places.
            size = num_tokens + 3 * self._most_tiles(num_tokens) + 3 * self._num_placed
        self._room = torch.zeros(size, dtype=torch.int32, device=device)

    def segments(self, num_tokens: int) -> Segments:
        """Return the buffers for a recorded forward pass of ``num_tokens`` tokens."""
        most = self._num_tokens
        tokens, rest = self._room[:num_tokens], self._room[most:]
        if self._tiled:
            triples = rest.view(-1, 3)
            places = triples[self._most_tiles(most) :][:num_tokens] if num_tokens <= self._num_placed else None
            return Segments(
                tokens, tokens[:0], tokens[:0], Tiles(triples[: self._most_tiles(num_tokens)], SHORT, places)
            )
        return Segments(tokens, rest[:num_tokens], rest[most : most + num_tokens + 1])

    def _most_tiles(self, num_tokens: int) -> int:
        """Return the largest number of tiles for ``num_tokens`` tokens.

        The last tile of a segment may have only one token.
        """
        segments = min(num_tokens, self._num_slots)
        return (num_tokens + (SHORT - 1) * segments) // SHORT

    def fill(self, of_tokens: Ints) -> None:
        """Fill the buffers for the next replay from the result of ``token_slots``, [T] int32, without waiting."""
        most = self._num_tokens
        tokens, slots, starts = _sorted(of_tokens)
        room = np.zeros(len(self._room), np.int32)
        room[: len(tokens)] = tokens
        if self._tiled:
            lines = make_tiles(slots, starts, SHORT)
            room[most : most + lines.size] = lines.reshape(-1)
            # Tokens that pad a step belong to the base model.
            places = room[len(room) - 3 * self._num_placed :]
            places[:] = -1
            if len(of_tokens) <= self._num_placed:
                places[: 3 * len(of_tokens)] = make_places(tokens, lines, len(of_tokens)).reshape(-1)
        else:
            room[most : most + len(slots)] = slots
            room[2 * most :] = len(tokens)
            room[2 * most : 2 * most + len(starts)] = starts
        refill(self._room, room)


def _sorted(of_tokens: Ints) -> tuple[Ints, Ints, Ints]:
    """Return ``tokens``, ``slots`` and ``starts`` of ``Segments`` on the host. They are empty without adapters."""
    order = np.argsort(of_tokens, kind="stable")
    ordered = of_tokens[order]
    num_base = int(np.searchsorted(ordered, 0))
    ordered = ordered[num_base:]
    starts = np.flatnonzero(np.diff(ordered, prepend=BASE))
    bounds = np.append(starts, len(ordered)).astype(np.int32)
    return order[num_base:].astype(np.int32), ordered[starts], bounds
