"""Dequantise GGUF's block formats to floating point, as ggml defines them (ggml-common.h and ggml-quants.c).

A block holds 32 or 256 consecutive elements of a row. Each function takes blocks [N, bytes] uint8 and returns their
elements [N, elements] fp32, computed as scale * integer (+ or - offset) in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..checkpoint.gguf import TENSOR_TYPES
from .finite import are_within
from .gguf_tables import TABLE_TYPES
from .mxfp4 import scaled_values
from .nvfp4 import decode_blocks
from .upload import upload

_CHUNK = 1 << 20  # elements widened to fp32 at once
_GPU_CHUNK = 1 << 23  # the same on a GPU, where each chunk takes some launches


def dequantise(data: npt.NDArray[np.uint8], type_name: str, out: Tensor, factor: float | None = None) -> None:
    """Dequantise blocks of type ``type_name`` into ``out``, on the device of ``out`` and in its dtype.

    Args:
        data: the raw bytes of a tensor, in whole blocks.
        factor: factor of a matrix in NVFP4, None for 1.
        out: contiguous, with as many elements as ``data`` encodes. At most 2^20 elements are held in fp32 at a time on
            a CPU, 2^23 on a GPU. The host waits for a GPU once, at the end, to check that all elements are finite.

    Raises:
        ValueError: an element is not finite.
    """
    block, block_bytes = _BLOCKS[type_name]
    flat, blocks = out.view(-1, block), data.reshape(-1, block_bytes)
    step = (_GPU_CHUNK if out.device.type == "cuda" else _CHUNK) // block
    found = []
    for start in range(0, len(blocks), step):
        # Copied, because torch has no read-only tensors for the mapped file.
        copied = torch.from_numpy(blocks[start : start + step].copy())
        raw = copied
        if out.device.type != "cpu":
            raw = torch.empty(copied.shape, dtype=torch.uint8, device=out.device)
            upload(raw, copied)
        elements = _DECODERS[type_name](raw) if factor is None else decode_blocks(raw, factor)
        found.append(are_within(elements, torch.finfo(torch.float32).max))
        flat[start : start + step] = elements
    if found and not bool(torch.stack(found).all()):
        raise ValueError("it has values that are not finite")


def _half(raw: Tensor, at: int) -> Tensor:
    """The fp16 number at byte ``at`` of each block: [N, 1] fp32."""
    return raw[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """[N, n] bytes -> [N, 2 n]: all low halves, then all high halves."""
    return torch.cat((raw & 15, raw >> 4), dim=1)


def _fifth_bits(raw: Tensor) -> Tensor:
    """[N, 4] bytes -> [N, 32]: bit j of the little-endian word, as 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return ((raw[:, :, None] >> shifts) & 1).flatten(1) << 4


def _q4_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * (_nibbles(raw[:, 2:]).float() - 8)


def _q4_1(raw: Tensor) -> Tensor:
    return _half(raw, 0) * _nibbles(raw[:, 4:]).float() + _half(raw, 2)


def _q5_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * ((_nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])).float() - 16)


def _q5_1(raw: Tensor) -> Tensor:
    return _half(raw, 0) * (_nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])).float() + _half(raw, 2)


def _q8_0(raw: Tensor) -> Tensor:
    return _half(raw, 0) * raw[:, 2:].view(torch.int8).float()


def _sub_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of the eight sub-blocks of Q4_K and Q5_K, six bits each in 12 bytes: two of [N, 8, 1] fp32.

    bytes 0..3    scale 0..3 in the low six bits, the upper bits of scale 4..7 in the high two
    bytes 4..7    minimum 0..3 in the low six bits, the upper bits of minimum 4..7 in the high two
    bytes 8..11   the lower bits of scale 4..7 in the low half, of minimum 4..7 in the high half
    """
    first, second, third = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    return (_half(raw, 0) * scales.float())[:, :, None], (_half(raw, 2) * minima.float())[:, :, None]


def _paired_nibbles(raw: Tensor) -> Tensor:
    """[N, 128] bytes -> [N, 8, 32]: 32 bytes hold two sub-blocks, the first in their low halves."""
    quarters = raw.view(-1, 4, 1, 32)
    return torch.cat((quarters & 15, quarters >> 4), dim=2).view(-1, 8, 32)


def _q4_k(raw: Tensor) -> Tensor:
    scales, minima = _sub_scales(raw)
    return (scales * _paired_nibbles(raw[:, 16:].contiguous()).float() - minima).flatten(1)


def _q5_k(raw: Tensor) -> Tensor:
    scales, minima = _sub_scales(raw)
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]
    fifth = (raw[:, None, 16:48] >> shifts & 1) << 4
    return (scales * (_paired_nibbles(raw[:, 48:].contiguous()) | fifth).float() - minima).flatten(1)


def _q6_k(raw: Tensor) -> Tensor:
    """Two halves of 128 elements: 64 bytes of low nibbles, 32 bytes of high bit pairs; a scale for each 16 elements."""
    low = raw[:, :128].contiguous().view(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 2, 4, 32)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=raw.device)[:, None]
    high = (raw[:, 128:192].contiguous().view(-1, 2, 1, 32) >> shifts & 3) << 4
    scales = _half(raw, 208) * raw[:, 192:208].view(torch.int8).float()
    return (scales[:, :, None] * ((low | high).float().view(-1, 16, 16) - 32)).flatten(1)


def _mxfp4(raw: Tensor) -> Tensor:
    """A stored exponent, then low halves of the first 16 values, high halves of the others."""
    return scaled_values(_nibbles(raw[:, 1:]), raw[:, :1])


# Plain types are decoded in chunks like the others.
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda raw: raw.view(dtype).float()


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "NVFP4": decode_blocks,
    **{name: each.decode for name, each in TABLE_TYPES.items()},
    **{name: _plain(dtype) for name, dtype in _PLAIN.items()},
}
_BLOCKS = {name: (block, block_bytes) for name, block, block_bytes in TENSOR_TYPES.values()}
