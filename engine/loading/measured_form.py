"""Measured choice between two forms of quantised blocks with equal results: as stored, or widened to the model's type.

Stored blocks have a quarter or half of the bytes of widened weights, but must be widened in every product. On some
machines the widening takes no extra time, because it overlaps with reading memory; on others it does. If there is
enough memory, both forms are kept, and a measurement determines up to how many rows the stored blocks are used.
Otherwise both are measured with the numbers of rows that steps have, and the faster one is kept.
"""

from __future__ import annotations

import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor

from ...kernels import ops, quantised_weights
from ...kernels.ops import QuantisedLinear
from ...kernels.quantised_weights import BLOCK_SIZES, BlockType, Format

ROWS: Final = (1, 4, 16, 32, 128, 512)
"""Numbers of rows that are measured: from one stream to a chunk of a prompt."""

LEAST_SPEED: Final = 0.8
"""Stored blocks are not kept alone if, with some number of rows, their speed relative to widened ones is below this."""

LEAST_BYTES: Final = 256 << 20
"""With fewer bytes of blocks and memory for both forms, only few rows are measured, because measuring all of ``ROWS``
would take half as long as loading the blocks."""

FEW_ROWS: Final = (1, 16, 64, 128, 256)
"""Numbers of rows that are measured if both forms are kept."""

MOST_ROUNDS: Final = 12
"""Largest number of rounds of a measurement, which a busy machine needs."""

DYNAMIC_ROWS: Final = (1, 8, 32)
"""Numbers of rows for which activations of 8 bits are measured: from one stream to the steps of many."""

_ALIKE: Final = 0.9  # times as fast, for which a second form is not worth its memory: three times as much
_CLEARLY: Final = 1.1  # times as fast
_FEW_ROUNDS: Final = 2
_FEW_WIDTH: Final = 1024
_FEW_SIZE: Final = 8 << 20  # values of the weight that few rows are measured with
_SIZE: Final = 24 << 20  # values of the measured weight: more than caches of a core hold, in either form
_TYPES: Final[dict[Format, BlockType]] = {
    Format.SYMMETRIC: "Q4_0",
    Format.NIBBLES: "Q4_1",
    Format.BYTES: "Q8_0",
    Format.SUPER_NIBBLES: "Q4_K",
    Format.SUPER_6_BITS: "Q6_K",
    Format.ZERO_POINTS: "U4_ZERO_POINT",
    Format.TABLE: "IQ4_NL",
    Format.FLOAT4: "E2M1",
    Format.SUPER_5_BITS: "Q5_K",
    Format.SUPER_3_BITS: "Q3_K",
    Format.SUPER_2_BITS: "Q2_K",
    Format.SUPER_GRID: "IQ2",
    Format.SUPER_TABLE: "IQ4_XS",
    Format.SUPER_FLOAT4: "NVFP4",
    Format.FIVE_BITS: "Q5_1",
    Format.SYMMETRIC_5_BITS: "Q5_0",
}
_MANY: Final = 128  # number of rows from which a weight of an eighth of the size is measured, to save time
_ROUNDS: Final = 5
_CONFIRMED: Final = 1.1  # a second time of at most this many times the least one confirms it


@dataclass(frozen=True, slots=True)
class FormSpeeds:
    """Speed of stored blocks relative to widened weights, for each number of rows in ``ROWS``."""

    speeds: tuple[float, ...]

    @property
    def is_never_slower(self) -> bool:
        """Whether blocks as stored are as fast for every number of rows, so that they are enough."""
        return min(self.speeds) >= _ALIKE

    @property
    def stored(self) -> bool:
        """Whether to keep only stored blocks: faster in the geometric mean, and nowhere below ``LEAST_SPEED``."""
        return math.prod(self.speeds) > 1.0 and min(self.speeds) >= LEAST_SPEED

    def __str__(self) -> str:
        speeds = ", ".join(f"{speed:.1f}" for speed in self.speeds)
        rows = ", ".join(map(str, ROWS))
        return (
            f"linear layers with blocks as stored are {speeds} times as fast as widened ones with {rows} rows "
            "(measured)"
        )


class StoredBlocks(NamedTuple):
    """The most common type of blocks and width of rows in a file, and the bytes of all blocks with a kernel."""

    type: BlockType
    width: int
    num_bytes: int


def blocks_of(matrices: Iterable[tuple[str, int, int]]) -> StoredBlocks | None:
    """Return the type of a checkpoint's blocks, among types with a kernel; None if it has no such blocks.

    Args:
        matrices: for each matrix its type, the number of values in a row, and its bytes.
    """
    sizes: Counter[tuple[str, int]] = Counter()
    for kind, row, num_bytes in matrices:
        if kind in BLOCK_SIZES:
            sizes[kind, row] += num_bytes
    if not sizes:
        return None
    (block_type, width), _ = sizes.most_common(1)[0]
    return StoredBlocks(cast(BlockType, block_type), width, sizes.total())


@cache
def measure_forms(blocks: StoredBlocks, dtype: torch.dtype) -> FormSpeeds:
    """Measure the speed of stored blocks relative to widened weights. The result is cached for the process.

    The two forms are timed alternately, five times each, and the least time of each is used.

    Args:
        dtype: type of activations.
    """
    return FormSpeeds(tuple(speed for part in _parts() for speed in _speeds(blocks, dtype, *part)))


@cache
def measure_few_rows(form: Format, dtype: torch.dtype) -> int:
    """Measure the largest number of rows for which stored blocks are used while their widened form is kept too.

    ``most_rows`` chooses it from the measured speeds. The two forms are timed alternately, twice each, and the lesser
    time of each is used. The result is cached for the process.

    Args:
        form: format of the blocks, without a rearrangement for the kernels.
        dtype: type of activations.
    """
    plain = quantised_weights.with_widened(_random_blocks(_TYPES[form], _FEW_WIDTH, _FEW_SIZE), dtype, few_rows=0)
    assert plain.widened is not None
    blocks = replace(plain, widened=plain.widened._replace(few_rows=FEW_ROWS[-1]))
    speeds = []
    for rows in FEW_ROWS:
        of_plain, of_blocks = _least_times(torch.randn(rows, _FEW_WIDTH).to(dtype), (plain, blocks), _FEW_ROUNDS)
        speeds.append(of_plain / of_blocks)
    return most_rows(speeds)


@cache
def is_dynamic_faster(form: Format, dtype: torch.dtype) -> bool:
    """Measure whether blocks are clearly faster with activations of 8 bits than without, blocks or widened.

    For each number of rows in ``DYNAMIC_ROWS``, activations of 8 bits are compared with the faster one of the two other
    forms: stored blocks and widened weights. The geometric mean of these ratios decides. Activations of 8 bits are not
    chosen if they are only slightly faster: they round more, and if the choice varied between starts of the server,
    answers would vary too. The result is cached for the process.

    Args:
        form: format of the blocks, without a rearrangement for the kernels; ``pack_blocks`` must accept it with
            ``dynamic``.
        dtype: type of activations.
    """
    raw = random_bytes(_TYPES[form], _FEW_WIDTH, _FEW_SIZE)
    plain = quantised_weights.with_widened(
        quantised_weights.pack_blocks(raw, _TYPES[form], widened=True), dtype, few_rows=0
    )
    assert plain.widened is not None
    blocks = replace(plain, widened=plain.widened._replace(few_rows=DYNAMIC_ROWS[-1]))
    dynamic = quantised_weights.pack_blocks(raw, _TYPES[form], dynamic=True)
    speed = 1.0
    for rows in DYNAMIC_ROWS:
        x = torch.randn(rows, _FEW_WIDTH).to(dtype)
        *others, of_dynamic = _least_times(x, (plain, blocks, dynamic), _FEW_ROUNDS)
        speed *= min(others) / of_dynamic
    return speed > _CLEARLY ** len(DYNAMIC_ROWS)


def most_rows(speeds: Sequence[float]) -> int:
    """Return the number of rows, among ``FEW_ROWS``, up to which blocks are to be used; 0 if they are never faster.

    It is the number at which the product of the speeds from the first to its own is largest. So one disturbed
    measurement has little weight.

    Args:
        speeds: speed of blocks relative to widened weights, for each number in ``FEW_ROWS``.
    """
    products = list(accumulate(speeds, operator.mul))
    best = max(products)
    return FEW_ROWS[products.index(best)] if best > 1.0 else 0


def _parts() -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Sizes of weights, and the rows that they are measured with."""
    few = tuple(rows for rows in ROWS if rows < _MANY)
    return (_SIZE, few), (_SIZE // 8, ROWS[len(few) :])


def _speeds(blocks: StoredBlocks, dtype: torch.dtype, size: int, rows: tuple[int, ...]) -> list[float]:
    block_type, width, _ = blocks
    stored = _random_blocks(block_type, width, size)
    plain = quantised_weights.with_widened(_random_blocks(block_type, width, size), dtype, few_rows=0)
    times = [_least_times(torch.randn(count, width).to(dtype), (plain, stored), _ROUNDS) for count in rows]
    return [of_plain / of_stored for of_plain, of_stored in times]


def _random_blocks(block_type: BlockType, width: int, size: int) -> QuantisedLinear:
    """Return a weight with ``size`` values. They are random, because AMX multiplies zeros twice as fast."""
    return quantised_weights.pack_blocks(random_bytes(block_type, width, size), block_type, widened=True)


def random_bytes(block_type: BlockType, width: int, size: int) -> Tensor:
    """Return random rows of a weight in blocks with ``size`` values, [rows, bytes of a row] uint8."""
    values, num_bytes = BLOCK_SIZES[block_type]
    below_half_infinity = 0x3F  # in each byte, so that scales are finite
    shape = max(1, size // width), width // values * num_bytes
    rows = torch.randint(below_half_infinity, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if block_type == "NVFP4":
        # The factor is in fp32: with random bytes products would be too small to be normal numbers, and slow.
        rows.view(len(rows), -1, num_bytes)[..., 3] = below_half_infinity - 1
    return rows


def _least_times(x: Tensor, layers: tuple[QuantisedLinear, ...], rounds: int) -> tuple[float, ...]:
    """Seconds of each layer, in turn, by ``least_times``."""
    return least_times([partial(_seconds, x, layer) for layer in layers], rounds)


def least_times(measures: Sequence[Callable[[], float]], rounds: int) -> tuple[float, ...]:
    """Return the least time of each measure. A round calls each measure once.

    After the given number of rounds, up to ``MOST_ROUNDS`` are made until each least time is confirmed by a second one
    that is nearly as short. On a busy machine other programs lengthen times by varying amounts, so a single short time
    is not reliable.
    """
    times = [[measure() for measure in measures] for _ in range(rounds)]
    while len(times) < MOST_ROUNDS and not all(map(_is_confirmed, zip(*times, strict=True))):
        times.append([measure() for measure in measures])
    return tuple(map(min, zip(*times, strict=True)))


def _is_confirmed(times: Sequence[float]) -> bool:
    """Whether the two least of some times are alike."""
    least, second = sorted(times)[:2]
    return second <= least * _CONFIRMED


def _seconds(x: Tensor, layer: QuantisedLinear) -> float:
    quantised_weights.flush(layer)  # a step reads all layers before it reads one again
    begin = time.perf_counter()
    ops.linear(x, layer)
    return time.perf_counter() - begin
