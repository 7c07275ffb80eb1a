"""Oracle of quantised matrices: the formulas of their formats once more, in numpy, number by number from bits.

It shares nothing with the product: integers are read from the bits of a column, scales and zero points are indexed by
each input's group. Tables of E4M3 and E2M1 are written out from the definition of the types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]
Parts = Mapping[str, Tensor]


def matrix_meant(config: Mapping[str, Any], parts: Parts) -> Numbers:
    """Return the matrix [N, K] that parts of a format mean. Raises any error for parts that mean none.

    Args:
        config: the ``quantization_config``.
        parts: by what follows the module's name.
    """
    match config["quant_method"]:
        case "gptq":
            return _gptq(config, parts)
        case "awq":
            return _awq(config, parts)
        case "bitsandbytes":
            return (
                _nibbles_of_table(parts) if config.get("load_in_4bit") else _rows(parts["weight"], parts["SCB"] / 127)
            )
        case "modelopt" if config["quant_algo"] == "NVFP4":
            return _nvfp4(parts["weight"], parts["weight_scale"], float(parts["weight_scale_2"]))
        case "compressed-tensors":
            return _compressed(config, parts)
        case "quanto":
            return _spread(
                _wide(parts.get("weight._data", parts.get("weight"))),
                _wide(parts.get("weight._scale", parts.get("weight_scale"))),
            )
        case "torchao":
            zeros = _wide(parts["_weight_zero_point"]) if "_weight_zero_point" in parts else np.zeros(1)
            numbers = _wide(parts.get("_weight_qdata", parts.get("weight")))  # some mix the names
            return _spread(numbers - _spread(np.ones_like(numbers), zeros), _wide(parts["_weight_scale"]))
        case _:
            return _scaled(_wide(parts["weight"]), _wide(parts.get("weight_scale", parts.get("weight_scale_inv"))))


def _wide(tensor: Tensor | None) -> Numbers:
    """A tensor's numbers; those of E4M3 by the definition of the type."""
    assert tensor is not None
    if tensor.dtype is torch.float8_e4m3fn:
        return _E4M3[tensor.view(torch.uint8).numpy()]
    return tensor.double().numpy()


def _e4m3(code: int) -> float:
    exponent, fraction = code >> 3 & 15, code & 7
    size = fraction / 8 * 2.0**-6 if not exponent else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return float("nan") if code & 127 == 127 else -size if code & 128 else size


_E4M3 = np.array([_e4m3(code) for code in range(256)])
_E2M1 = np.array([sign * size for sign in (1, -1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


def _bits(words: Tensor, bits: int, count: int) -> Numbers:
    """Integers that follow each other in the bits of each row of words, from the lowest on: [n, W] -> [n, count]."""
    assert words.dtype is torch.int32
    assert -(-count * bits // 32) == words.shape[1]
    raw = np.ascontiguousarray(words.numpy()).view(np.uint8)
    single = np.unpackbits(raw, axis=1, bitorder="little")[:, : count * bits].reshape(len(raw), count, bits)
    return (single * (1 << np.arange(bits))).sum(-1).astype(np.float64)


def _gptq(config: Mapping[str, Any], parts: Parts) -> Numbers:
    bits, scales = config["bits"], _wide(parts["scales"])
    width = parts["qweight"].shape[0] * 32 // bits
    group_size = config["group_size"] if config.get("group_size", -1) not in (-1, None) else width
    group = parts["g_idx"].numpy() if "g_idx" in parts else np.arange(width) // group_size
    assert group.min() >= 0  # numpy counts negative indices from the end
    assert scales.shape == (width // group_size, parts["qweight"].shape[1])
    zeros = _gptq_zeros(parts["qzeros"], bits, scales.shape[1])
    if (config.get("checkpoint_format") or "gptq") == "gptq":
        zeros = _plus_one(parts["qzeros"], bits, scales.shape[1])
    numbers = _bits(parts["qweight"].T.contiguous(), bits, width)
    return (numbers - zeros.T[:, group]) * scales.T[:, group]


def _gptq_zeros(words: Tensor, bits: int, count: int) -> Numbers:
    return _bits(words, bits, count)


def _plus_one(words: Tensor, bits: int, count: int) -> Numbers:
    """Zero points that are stored less one, in whole words where integers do not cross them."""
    if 32 % bits:
        return (_bits(words, bits, count) + 1) % (1 << bits)
    one_each = int("".join(["0" * (bits - 1) + "1"] * (32 // bits)), 2)
    raised = (words.numpy().astype(np.int64) + one_each) % (1 << 32)
    return _bits(torch.from_numpy(raised.astype(np.uint32).view(np.int32)), bits, count)


def _awq(config: Mapping[str, Any], parts: Parts) -> Numbers:
    words, group_size = parts["qweight"], config.get("group_size", 128)
    if config.get("version", "gemm") == "gemv":
        width = words.shape[1] * 8
        groups = width // (group_size if group_size not in (-1, None) else width)
        zeros = _bits(parts["qzeros"], 4, parts["qzeros"].shape[1] * 8)[:, :groups]
        numbers, scales = _bits(words, 4, width), _wide(parts["scales"])[:, :groups]
    else:
        numbers, zeros, scales = _columns(words).T, _columns(parts["qzeros"]).T, _wide(parts["scales"]).T
        width = words.shape[0]
    assert len(numbers) == len(zeros) == len(scales)
    of_input = np.arange(width) * scales.shape[1] // width
    return (numbers - zeros[:, of_input]) * scales[:, of_input]


def _columns(words: Tensor) -> Numbers:
    """The integers of AWQ's words by columns: the eight of a word are those of columns 0, 2, 4, 6, 1, 3, 5, 7."""
    stored = _bits(words, 4, words.shape[1] * 8).reshape(len(words), -1, 8)
    ordered = np.empty_like(stored)
    ordered[..., [0, 2, 4, 6, 1, 3, 5, 7]] = stored
    return ordered.reshape(len(words), -1)


def _compressed(config: Mapping[str, Any], parts: Parts) -> Numbers:
    group = next(iter(config["config_groups"].values()))
    form, bits = group.get("format") or config["format"], group["weights"]["num_bits"]
    if form == "nvfp4-pack-quantized":
        return _nvfp4(parts["weight_packed"], parts["weight_scale"], 1 / float(parts["weight_global_scale"]))
    if form == "mxfp4-pack-quantized":
        scales = np.exp2(parts["weight_scale"].double().numpy() - 127)
        return _scaled(_pairs(parts["weight_packed"]), scales)
    if form == "pack-quantized":
        rows, width = parts["weight_shape"].tolist()
        numbers = _bits(parts["weight_packed"], bits, width) - (1 << (bits - 1))
        assert len(numbers) == rows
    else:
        numbers = _wide(parts["weight"])
    scales, zeros = _wide(parts["weight_scale"]), np.zeros(1)
    if (stored := parts.get("weight_zero_point")) is not None and not group["weights"].get("symmetric", True):
        is_packed = form == "pack-quantized"
        zeros = _bits(stored.T.contiguous(), bits, len(numbers)).T - (1 << (bits - 1)) if is_packed else _wide(stored)
    return _spread(numbers - _spread(np.ones_like(numbers), zeros), scales)


def _scaled(numbers: Numbers, scales: Numbers) -> Numbers:
    return _spread(numbers, scales)


def _spread(numbers: Numbers, scales: Numbers) -> Numbers:
    """Numbers [N, K] times a scale of the matrix, of each row, of groups of inputs, or of blocks of 128 by 128."""
    rows, width = numbers.shape
    if scales.size == 1:
        return numbers * scales.reshape(())
    if scales.ndim == 1:
        scales = scales[:, None]
    row = np.arange(rows) if len(scales) == rows else np.arange(rows) // 128
    column = np.arange(width) * scales.shape[1] // width
    return numbers * scales[row][:, column]


def _rows(numbers: Tensor, scales: Tensor) -> Numbers:
    return _spread(_wide(numbers), _wide(scales))


def _pairs(packed: Tensor) -> Numbers:
    """E2M1 numbers, the first of a byte in its lower half."""
    raw = packed.numpy()
    assert raw.dtype == np.uint8
    return _E2M1[np.stack((raw & 15, raw >> 4), axis=-1).reshape(len(raw), -1)]


def _nvfp4(packed: Tensor, scales: Tensor, factor: float) -> Numbers:
    return _spread(_pairs(packed), _wide(scales) * np.float32(factor))


def _nibbles_of_table(parts: Parts) -> Numbers:
    """The table of bitsandbytes at numbers of four bits, the first of a byte in its upper half, times their block's."""
    state = json.loads(bytes(next(part for name, part in parts.items() if "quant_state" in name).tolist()))
    rows, width = state["shape"]
    raw = parts["weight"].contiguous().view(torch.uint8).reshape(-1).numpy()
    numbers = np.stack((raw >> 4, raw & 15), axis=-1).reshape(-1)[: rows * width]
    scales = _wide(parts["weight.absmax"])
    if (size := state.get("nested_blocksize")) is not None:
        table = _wide(parts["weight.nested_quant_map"])
        nested = _wide(parts["weight.nested_absmax"])[np.arange(len(scales)) // size]
        scales = table[scales.astype(int)] * nested + state.get("nested_offset", 0.0)
    flat = _wide(parts["weight.quant_map"])[numbers] * scales[np.arange(rows * width) // state["blocksize"]]
    return flat.reshape(rows, width)
