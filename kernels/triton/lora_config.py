"""Tiles and launch shapes of the Triton LoRA kernels, computed on the host.

There are two sizes of tiles. For short segments, as in decode, a tile holds 16 tokens, the smallest size of tensor
cores: the time is dominated by reading each factor once, and the sums over the inputs are split, on the device, to get
enough programs for all multiprocessors. For long segments, as in prefill, a tile holds 64 tokens, and a factor is read
once for all of them.

segments            slot 0: tokens 9 10 11 | slot 2: tokens 0 1 2 3 4       tokens = 9 10 11 0 1 2 3 4
tiles of 4 tokens   (0, 0, 3)              | (2, 3, 7) (2, 7, 8)            (slot, first, end) in ``tokens``
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .launch import cdiv, power_of_two

Ints = NDArray[np.int32]

SHORT = 16
LONG = 64
TILES = (SHORT, LONG)

MOST_PLACED = 64
"""Largest number of tokens of a step in which expansions of adapters are within the norm or rotation that reads them.

A program of the norm has one token and reads all of B for it, so the bytes grow with the tokens and the ranks. By
arithmetic, for 64 tokens of rank 16 and 4,096 columns, these are 8 MB from the L2 cache, less time than a launch takes.
"""

MOST_SPLITS = {SHORT: 8, LONG: 4}
"""By tile size: each expansion of a tile reads all parts, which is expensive for a long tile."""
_NUM_WARPS = 4  # number of warps of a shrink program
_NUM_STAGES = 3
_WAVES = 1  # number of programs wanted per multiprocessor


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """Launch shape of ``A x``.

    Attributes:
        ranks: number of rows of A in one program.
        inputs: number of columns of A in one iteration of the program's loop.
        most_splits: largest number of parts of the inputs, each summed by its own programs; a power of two.
        num_warps: number of warps of a program.
        num_stages: number of iterations whose loads run in parallel.
    """

    ranks: int
    inputs: int
    most_splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """Launch shape of ``y + B (A x)``.

    Attributes:
        columns: number of columns of y in one program, all of one module.
        ranks: number of columns of B in one iteration of the program's loop.
        num_warps: number of warps of a program.
        num_stages: number of iterations whose loads run in parallel.
    """

    columns: int
    ranks: int
    num_warps: int
    num_stages: int


def make_tiles(slots: Ints, starts: Ints, size: int) -> Ints:
    """Cut segments into tiles of at most ``size`` tokens: [N, 3] int32 of (slot, first, end).

    Args:
        slots: [G] int32, the slot of each segment.
        starts: [G + 1] int32, segment g has positions ``starts[g]:starts[g + 1]``; no segment is empty.
        size: largest number of tokens of a tile.
    """
    counts = -(-np.diff(starts) // size)
    segment = np.repeat(np.arange(len(slots)), counts)
    before = np.cumsum(counts) - counts
    first = starts[segment] + (np.arange(len(segment)) - before[segment]) * size
    end = np.minimum(first + size, starts[segment + 1])
    return np.stack([slots[segment], first, end], axis=1).astype(np.int32)


def make_places(tokens: Ints, lines: Ints, num_tokens: int) -> Ints:
    """Return slot, position and tile of each token of a step, [num_tokens, 3] int32, -1 for tokens in no tile.

    Args:
        tokens: [S] int32, the tokens of the segments in order.
        lines: [N, 3] int32, the tiles of these segments, from ``make_tiles``.
        num_tokens: number of tokens of the step.
    """
    places = np.full((num_tokens, 3), -1, np.int32)
    tile = np.repeat(np.arange(len(lines)), lines[:, 2] - lines[:, 1])
    places[tokens] = np.stack([lines[tile, 0], np.arange(len(tokens)), tile], axis=1)
    return places


def tile_size(num_tokens: int, num_segments: int) -> int:
    """Return the number of tokens of a tile: ``LONG`` if segments fill such tiles on average, else ``SHORT``."""
    return LONG if num_tokens >= LONG * num_segments else SHORT


def shrink_config(tile: int, ranks: int, width: int, item_size: int) -> ShrinkConfig:
    """Choose the launch shape of a shrink. A part has at least two iterations.

    Args:
        tile: number of tokens of a tile.
        ranks: the largest total rank of an adapter in the projection, over its modules.
        width: number of inputs, K.
        item_size: bytes of a number of x and A.
    """
    block = min(power_of_two(ranks, 16), _most_ranks(tile))
    inputs = _inputs(tile, item_size)
    iterations = cdiv(width, inputs)
    splits = 1
    while splits < MOST_SPLITS[tile] and 4 * splits <= iterations:
        splits *= 2
    return ShrinkConfig(block, inputs, splits, _NUM_WARPS, _NUM_STAGES)


def splits_of_long(num_programs: int, num_sms: int) -> int:
    """Return the number of parts for long tiles that have ``num_programs`` programs without a split: a power of two."""
    splits = 1
    while splits * num_programs < wanted_programs(num_sms) and splits < MOST_SPLITS[LONG]:
        splits *= 2
    return splits


def numbers_of_parts(tile: int) -> list[int]:
    """Return the numbers of parts to compile an expansion for: the largest for short tiles, all for long ones."""
    most = MOST_SPLITS[tile]
    return [most] if tile == SHORT else [1 << n for n in range(most.bit_length())]


def wanted_programs(num_sms: int) -> int:
    """Return the number of shrink programs that keep ``num_sms`` multiprocessors busy."""
    return _WAVES * num_sms


def expand_config(tile: int, num_tiles: int, columns: int, num_sms: int) -> ExpandConfig:
    """Choose the launch shape of an expansion.

    Args:
        tile: number of tokens of a tile.
        num_tiles: number of tiles of the step.
        columns: number of columns of all modules, N.
        num_sms: number of multiprocessors.
    """
    if tile == LONG:
        return _expand_config(128)
    is_enough = num_tiles * cdiv(columns, 128) >= _WAVES * num_sms
    return _expand_config(128 if is_enough else 64)


def shrink_configs(tile: int, item_size: int) -> Iterator[ShrinkConfig]:
    """Yield every result of ``shrink_config`` for a tile size, with one split."""
    ranks = 16
    while ranks <= _most_ranks(tile):
        yield ShrinkConfig(ranks, _inputs(tile, item_size), 1, _NUM_WARPS, _NUM_STAGES)
        ranks *= 2


def expand_configs(tile: int) -> Iterator[ExpandConfig]:
    """Yield every result of ``expand_config`` for a tile size."""
    for columns in (64, 128) if tile == SHORT else (128,):
        yield _expand_config(columns)


def _most_ranks(tile: int) -> int:
    return 32 if tile == SHORT else 64


def _inputs(tile: int, item_size: int) -> int:
    return (512 if tile == SHORT else 128) // item_size


def _expand_config(columns: int) -> ExpandConfig:
    return ExpandConfig(columns, 32, num_warps=4, num_stages=2)
