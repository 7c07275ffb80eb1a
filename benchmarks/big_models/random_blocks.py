"""Random tensors in the types of GGUF, written as they are stored, with the variance that preserves a layer's inputs.

Integers are uniform; scales are the same in all blocks. So a tensor costs no more than its random bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_DEVIATION = {"Q4_0": 4.61, "Q4_1": 4.61, "Q8_0": 73.9, "Q4_K": 4.61, "Q6_K": 18.5}  # of uniform integers
_SUB_SCALE, _SUB_MINIMUM = 8, 60  # of six bits, in Q4_K; 60 / 8 = 7.5 is the mean of 0 .. 15
_Q6_K_SCALE = 8

BLOCK_VALUES = {"F32": 1, "BF16": 1, "Q4_0": 32, "Q4_1": 32, "Q8_0": 32, "Q4_K": 256, "Q6_K": 256}


def random_tensor(kind: str, rows: int, columns: int, random: np.random.Generator) -> Bytes:
    """Return a matrix of a GGUF type, [rows, bytes of a row] uint8. Raises KeyError for another type."""
    blocks = rows * columns // BLOCK_VALUES[kind]
    deviation = columns**-0.5
    if kind == "BF16":
        return _bfloat16(rows * columns, deviation, random).reshape(rows, -1)
    return _BLOCKS[kind](blocks, deviation / _DEVIATION[kind], random).reshape(rows, -1)


def _bfloat16(count: int, deviation: float, random: np.random.Generator) -> Bytes:
    wide = random.random(count, dtype=np.float32)
    wide -= 0.5
    wide *= deviation * 12**0.5
    return upper_half(wide)


def upper_half(wide: npt.NDArray[np.float32]) -> Bytes:
    """Return the bytes of fp32 numbers cut to bfloat16."""
    return np.ascontiguousarray(wide.view(np.uint16)[1::2]).view(np.uint8)


def _half(value: float, blocks: int) -> Bytes:
    return np.full((blocks, 1), value, dtype=np.float16).view(np.uint8)


def _bytes(blocks: int, count: int, random: np.random.Generator) -> Bytes:
    return np.frombuffer(random.bytes(blocks * count), dtype=np.uint8).reshape(blocks, count)


def _q4_0(blocks: int, scale: float, random: np.random.Generator) -> Bytes:
    return np.concatenate((_half(scale, blocks), _bytes(blocks, 16, random)), axis=1)


def _q4_1(blocks: int, scale: float, random: np.random.Generator) -> Bytes:
    return np.concatenate((_half(scale, blocks), _half(-7.5 * scale, blocks), _bytes(blocks, 16, random)), axis=1)


def _q8_0(blocks: int, scale: float, random: np.random.Generator) -> Bytes:
    return np.concatenate((_half(scale, blocks), _bytes(blocks, 32, random)), axis=1)


def _q4_k(blocks: int, scale: float, random: np.random.Generator) -> Bytes:
    """Scale, scale of the minima, eight scales and eight minima of six bits in 12 bytes, and 128 bytes of values."""
    lower = _SUB_SCALE & 63 | _SUB_SCALE >> 4 << 6, _SUB_MINIMUM & 63 | _SUB_MINIMUM >> 4 << 6
    six_bits = np.array([*[lower[0]] * 4, *[lower[1]] * 4, *[_SUB_SCALE & 15 | (_SUB_MINIMUM & 15) << 4] * 4], np.uint8)
    scales = _half(scale / _SUB_SCALE, blocks), _half(scale / _SUB_SCALE, blocks)
    return np.concatenate((*scales, np.broadcast_to(six_bits, (blocks, 12)), _bytes(blocks, 128, random)), axis=1)


def _q6_k(blocks: int, scale: float, random: np.random.Generator) -> Bytes:
    """192 bytes of values, sixteen scales of a byte, and a scale."""
    scales = np.full((blocks, 16), _Q6_K_SCALE, dtype=np.uint8)
    return np.concatenate((_bytes(blocks, 192, random), scales, _half(scale / _Q6_K_SCALE, blocks)), axis=1)


_BLOCKS: dict[str, Callable[[int, float, np.random.Generator], Bytes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
