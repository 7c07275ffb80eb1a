"""Which shapes of work the low-rank kernels take, by what a step holds. Plain functions of plain numbers.

Two forms. Where segments are short, as when each sequence decodes one token, a tile holds 16 tokens, the least that
tensor cores multiply: what counts then is to read every factor once, with enough programs for all multiprocessors, so
the sums over the inputs are split. Where they are long, as in prefill, a tile holds 64 tokens, and a factor is read
once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .launch import cdiv, power_of_two

SHORT = 16
LONG = 64
TILES = (SHORT, LONG)

MOST_SPLITS = {SHORT: 8, LONG: 4}
"""By the tile: each expansion of a tile reads all parts, which is much where the tile is long."""
_NUM_WARPS = 4  # of a shrink
_NUM_STAGES = 3
_WAVES = 2  # programs that each multiprocessor should get


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """How ``A x`` is computed.

    Attributes:
        ranks: rows of A that a program takes.
        inputs: columns of A in one turn of its loop.
        splits: parts of the inputs, each summed by programs of its own; a power of two.
        num_warps: of a program.
        num_stages: turns of the loop whose loads are under way together.
    """

    ranks: int
    inputs: int
    splits: int
    num_warps: int
    num_stages: int

    def split_width(self, width: int) -> int:
        """Inputs in a part, whole turns of the loop."""
        return cdiv(cdiv(width, self.inputs), self.splits) * self.inputs


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """How ``y + B (A x)`` is computed.

    Attributes:
        columns: of y that a program takes, all of one module.
        ranks: columns of B in one turn of its loop.
        num_warps: of a program.
        num_stages: turns of the loop whose loads are under way together.
    """

    columns: int
    ranks: int
    num_warps: int
    num_stages: int


def tile_size(num_tokens: int, num_segments: int) -> int:
    """Tokens of a tile: ``LONG`` where segments fill such tiles on average, else ``SHORT``."""
    return LONG if num_tokens >= LONG * num_segments else SHORT


def shrink_config(tile: int, num_tiles: int, ranks: int, width: int, item_size: int, num_sms: int) -> ShrinkConfig:
    """The form of a shrink.

    Args:
        tile: tokens of a tile.
        num_tiles: tiles of the step.
        ranks: the most that an adapter has in the projection, of all its modules together.
        width: K, the inputs.
        item_size: bytes of a value of x and A.
        num_sms: multiprocessors.
    """
    block = min(power_of_two(ranks, 16), _most_ranks(tile))
    inputs = _inputs(tile, item_size)
    programs = num_tiles * cdiv(ranks, block)
    turns = cdiv(width, inputs)
    splits = 1
    while splits < MOST_SPLITS[tile] and programs * splits < _WAVES * num_sms and 4 * splits <= turns:
        splits *= 2
    return ShrinkConfig(block, inputs, splits, _NUM_WARPS, _NUM_STAGES)


def expand_config(tile: int, num_tiles: int, columns: int, num_sms: int) -> ExpandConfig:
    """The form of an expansion.

    Args:
        tile: tokens of a tile.
        num_tiles: tiles of the step.
        columns: N, of all modules.
        num_sms: multiprocessors.
    """
    if tile == LONG:
        return _expand_config(tile, 128)
    is_enough = num_tiles * cdiv(columns, 128) >= _WAVES * num_sms
    return _expand_config(tile, 128 if is_enough else 64)


def shrink_configs(tile: int, item_size: int) -> Iterator[ShrinkConfig]:
    """Every form that ``shrink_config`` can give for a size of tiles, but for its splits."""
    ranks = 16
    while ranks <= _most_ranks(tile):
        yield ShrinkConfig(ranks, _inputs(tile, item_size), 1, _NUM_WARPS, _NUM_STAGES)
        ranks *= 2


def numbers_of_splits(tile: int) -> list[int]:
    """Every number of splits that ``shrink_config`` can give for a size of tiles."""
    return [1 << n for n in range(MOST_SPLITS[tile].bit_length())]


def expand_configs(tile: int) -> Iterator[ExpandConfig]:
    """Every form that ``expand_config`` can give for a size of tiles."""
    for columns in (64, 128) if tile == SHORT else (128,):
        yield _expand_config(tile, columns)


def _most_ranks(tile: int) -> int:
    return 32 if tile == SHORT else 64


def _inputs(tile: int, item_size: int) -> int:
    return (512 if tile == SHORT else 128) // item_size


def _expand_config(tile: int, columns: int) -> ExpandConfig:
    return ExpandConfig(columns, 32, num_warps=4 if tile == SHORT else 8, num_stages=2)
