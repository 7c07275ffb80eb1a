"""Small matrices as each format of quantised folders stores them, and ways to damage them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor

from rootgraft.engine.checkpoint.quantization_config import read_quantization
from rootgraft.engine.loading.weight_readers import SafetensorsFolder

ROWS, WIDTH = 128, 256
"""Shape of the matrices."""

_BLOCK = [128, 128]
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "w4a16": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}),
    "w4a16 asymmetric": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    "w8a16 by channel": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
    "w3 asymmetric": ("pack-quantized", {"num_bits": 3, "strategy": "channel", "symmetric": False}),
    "w8a8": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
    "w8 tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor", "symmetric": True}),
    "w8 asymmetric": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "w8 groups": ("naive-quantized", {"num_bits": 8, "strategy": "group", "group_size": 64, "symmetric": True}),
    "fp8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 blocks": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": _BLOCK}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
}  # fmt: skip
"""Schemes of compressed-tensors: the format, and the arguments of its weights."""


def compressed(form: str, args: dict[str, Any], weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What compressed-tensors stores of a weight, and what it reads back, in fp32 as far as its scales allow."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=form)
    state = {"weight": weight, **_scales_of(args, weight)}
    compressor = cast(Any, BaseCompressor.get_value_from_registry(form))
    stored = compressor.compress(dict(state), scheme)
    return stored, compressor.decompress(dict(stored), scheme)["weight"].float()


def _scales_of(args: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
    """Scales and zero points of a weight, for the granularity of a scheme."""
    rows, width = weight.shape
    match args["strategy"]:
        case "tensor":
            parts = weight.reshape(1, 1, -1)
        case "channel":
            parts = weight.reshape(rows, 1, width)
        case "block":
            parts = weight.unfold(0, 128, 128).unfold(1, 128, 128).flatten(2)
        case _:
            parts = weight.reshape(rows, -1, args["group_size"])
    largest = parts.abs().amax(-1)
    if args.get("type") == "float" and args["num_bits"] == 4:
        if args["group_size"] == 32:
            return {"weight_scale": torch.exp2(torch.floor(torch.log2(largest)) - 2)}
        total = torch.tensor([448 * 6 / weight.abs().max()])
        scale = (total * largest / 6).to(torch.float8_e4m3fn)
        return {"weight_scale": scale.float(), "weight_global_scale": total}
    if args.get("type") == "float":
        return {"weight_scale": largest / 448}
    levels = 2 ** args["num_bits"] - 1
    if args["symmetric"]:
        return {"weight_scale": largest * 2 / levels}
    lowest, highest = parts.amin(-1), parts.amax(-1)
    scale = (highest - lowest) / levels
    zero = (-(2 ** (args["num_bits"] - 1)) - torch.round(lowest / scale)).clamp(-(levels + 1) // 2, levels // 2)
    return {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}


def compressed_config(form: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a scheme of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"type": "int", **args}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [ROWS, WIDTH] of a format: its ``quantization_config``, and its parts by name behind the module's."""

    config: dict[str, Any]
    parts: dict[str, Tensor]


def folder_of(matrix: StoredMatrix, folder: Path) -> SafetensorsFolder:
    """Write a matrix as the tensor ``m.weight`` of a folder, and open that."""
    quantization = read_quantization({"quantization_config": matrix.config})
    parts = {f"m.{name}": part.contiguous() for name, part in matrix.parts.items()}
    save_file(parts, folder / "model.safetensors")
    return SafetensorsFolder(folder, (), quantization)


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape).to(torch.int32)


def _gptq(bits: int, group: int, **more: Any) -> StoredMatrix:
    groups = WIDTH // group
    parts = {
        "qweight": _words(WIDTH * bits // 32, ROWS),
        "qzeros": _words(groups, ROWS * bits // 32),
        "scales": (torch.rand(groups, ROWS) * 0.01 + 0.001).half(),
        "g_idx": torch.arange(WIDTH, dtype=torch.int32) // group,
    }
    return StoredMatrix({"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False} | more, parts)


def _awq(version: str) -> StoredMatrix:
    groups = WIDTH // 32
    scales = torch.rand(groups, ROWS).half() * 0.01
    if version == "gemm":
        parts = {"qweight": _words(WIDTH, ROWS // 8), "qzeros": _words(groups, ROWS // 8), "scales": scales}
    else:
        padded = torch.zeros(ROWS, 32).half()
        padded[:, :groups] = scales.T
        parts = {"qweight": _words(ROWS, WIDTH // 8), "qzeros": _words(ROWS, 4), "scales": padded}
    return StoredMatrix({"quant_method": "awq", "bits": 4, "group_size": 32, "version": version}, parts)


def _float8() -> Tensor:
    return torch.randn(ROWS, WIDTH).clamp(-4, 4).mul(100).to(torch.float8_e4m3fn)


def _bnb(is_nested: bool, kind: str = "nf4") -> StoredMatrix:
    blocks = ROWS * WIDTH // 64
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": [ROWS, WIDTH]}
    parts = {
        "weight": torch.randint(0, 256, (ROWS * WIDTH // 2, 1), dtype=torch.uint8),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.absmax": torch.rand(blocks),
    }
    if is_nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}
        parts["weight.absmax"] = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        parts |= {
            "weight.nested_absmax": torch.rand(blocks // 256),
            "weight.nested_quant_map": torch.linspace(0, 1, 256),
        }
    text = json.dumps(state).encode()
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return StoredMatrix(config, parts)


def _bnb_int8() -> StoredMatrix:
    numbers = torch.randint(-128, 128, (ROWS, WIDTH)).to(torch.int8)
    parts = {"weight": numbers, "SCB": torch.rand(ROWS), "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return StoredMatrix({"quant_method": "bitsandbytes", "load_in_8bit": True}, parts)


def _modelopt_nvfp4() -> StoredMatrix:
    parts = {
        "weight": torch.randint(0, 256, (ROWS, WIDTH // 2), dtype=torch.uint8),
        "weight_scale": (torch.rand(ROWS, WIDTH // 16) * 100).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.001),
    }
    return StoredMatrix({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, parts)


def _of_compressed(kind: str) -> Callable[[], StoredMatrix]:
    def build() -> StoredMatrix:
        form, args = COMPRESSED[kind]
        parts, _ = compressed(form, args, torch.randn(ROWS, WIDTH))
        return StoredMatrix(compressed_config(form, args), {name: part for name, part in parts.items() if part.numel()})

    return build


def _torchao_config(kind: str, **values: Any) -> dict[str, Any]:
    """Return the ``quantization_config`` that transformers writes for a config of torchao 0.18."""
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": values}}}


def _torchao_int8(kind: str, scales: Tensor) -> StoredMatrix:
    parts = {
        "_weight_qdata": torch.randint(-128, 128, (ROWS, WIDTH)).to(torch.int8),
        "_weight_scale": scales,
        "_weight_zero_point": torch.zeros(scales.shape, dtype=torch.int8),
    }
    return StoredMatrix(_torchao_config(kind, group_size=None), parts)


def _torchao_intx(group: int, mapping: str) -> StoredMatrix:
    shape = ROWS, WIDTH // group
    zeros = torch.randint(-8, 8, shape) if mapping == "ASYMMETRIC" else torch.zeros(shape)
    parts = {
        "_weight_qdata": torch.randint(-8, 8, (ROWS, WIDTH)).to(torch.int8),
        "_weight_scale": torch.rand(shape).mul(0.01).add(0.001).bfloat16(),
        "_weight_zero_point": zeros.to(torch.int8),
    }
    config = _torchao_config(
        "IntxWeightOnlyConfig",
        granularity={"_type": "PerGroup", "_version": 1, "_data": {"group_size": group}},
        intx_packing_format={"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
        mapping_type={"_type": "MappingType", "_data": mapping},
        weight_dtype={"_type": "torch.dtype", "_data": "int4"},
    )
    return StoredMatrix(config, parts)


def _quanto(kind: str, numbers: Tensor, scales: Tensor) -> StoredMatrix:
    parts = {"weight._data": numbers, "weight._scale": scales}
    parts |= {"input_scale": torch.tensor(1.0), "output_scale": torch.tensor(1.0)}
    return StoredMatrix({"quant_method": "quanto", "modules": {"m": {"weights": kind, "activations": "none"}}}, parts)


def _torchao_float8() -> StoredMatrix:
    return StoredMatrix(
        _torchao_config("Float8WeightOnlyConfig", weight_dtype={"_type": "torch.dtype", "_data": "float8_e4m3fn"}),
        {"_weight_qdata": _float8(), "_weight_scale": torch.rand(ROWS, 1)},
    )


_FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": _BLOCK}
MATRICES: dict[str, Callable[[], StoredMatrix]] = {
    "gptq 2 bits": lambda: _gptq(2, 32),
    "gptq 3 bits": lambda: _gptq(3, 64),
    "gptq 4 bits": lambda: _gptq(4, 32, desc_act=True),
    "gptq 4 bits by column": lambda: _gptq(4, WIDTH, group_size=-1),
    "gptq 8 bits": lambda: _gptq(8, 128, checkpoint_format="gptq_v2"),
    "awq gemm": lambda: _awq("gemm"),
    "awq gemv": lambda: _awq("gemv"),
    **{f"compressed-tensors {kind}": _of_compressed(kind) for kind in COMPRESSED},
    "fp8": lambda: StoredMatrix({"quant_method": "fp8"}, {"weight": _float8(), "weight_scale": torch.tensor(0.01)}),
    "fp8 in blocks": lambda: StoredMatrix(
        _FP8_BLOCKS, {"weight": _float8(), "weight_scale_inv": torch.rand(1, WIDTH // 128)}
    ),
    "fbgemm": lambda: StoredMatrix(
        {"quant_method": "fbgemm_fp8"}, {"weight": _float8(), "weight_scale": torch.rand(ROWS, 1)}
    ),
    "modelopt fp8": lambda: StoredMatrix(
        {"quant_method": "modelopt", "quant_algo": "FP8"}, {"weight": _float8(), "weight_scale": torch.tensor(0.01)}
    ),
    "modelopt nvfp4": _modelopt_nvfp4,
    "bitsandbytes nf4": lambda: _bnb(is_nested=False),
    "bitsandbytes nf4 twice": lambda: _bnb(is_nested=True),
    "bitsandbytes fp4": lambda: _bnb(is_nested=False, kind="fp4"),
    "bitsandbytes int8": _bnb_int8,
    "torchao int8": lambda: _torchao_int8("Int8WeightOnlyConfig", torch.rand(ROWS, 1)),
    "torchao int8 by tensor": lambda: _torchao_int8("Int8DynamicActivationInt8WeightConfig", torch.rand(1, 1)),
    "torchao fp8": _torchao_float8,
    "quanto int8": lambda: _quanto(
        "qint8", torch.randint(-128, 128, (ROWS, WIDTH)).to(torch.int8), torch.rand(ROWS, 1).bfloat16()
    ),
    "quanto fp8": lambda: _quanto("qfloat8", _float8(), torch.rand(ROWS, 1).bfloat16()),
    "torchao 4 bits": lambda: _torchao_intx(32, "SYMMETRIC"),
    "torchao 4 bits asymmetric": lambda: _torchao_intx(64, "ASYMMETRIC"),
}
"""A maker of a random matrix for each format."""


def mxfp4_stack() -> StoredMatrix:
    """Return two experts [WIDTH, ROWS] as gpt-oss stores them, whose parts follow the name itself."""
    blocks = torch.randint(0, 256, (2, ROWS, WIDTH // 32, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, blocks.shape[:3], dtype=torch.uint8)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return StoredMatrix(config, {"_blocks": blocks, "_scales": scales})


_ODD_VALUES = (None, True, -1, 0, 5, 1 << 70, 2.5, 1e400, "", "x", [], [[]], {}, {"a": 1})


def damaged(matrix: StoredMatrix, seed: int) -> StoredMatrix:
    """Return a matrix one of whose parts, or whose config, was changed as the seed says."""
    draw = random.Random(seed)
    parts = dict(matrix.parts)
    name = draw.choice(sorted(parts))
    kind = draw.randrange(len(_DAMAGES) + len(_CHANGES))
    if kind >= len(_DAMAGES):
        return _CHANGES[kind - len(_DAMAGES)](StoredMatrix(matrix.config, parts), name, draw)
    # A copy, as contiguous tensors with dimensions of length 1 may have any stride there.
    part = torch.empty(parts[name].shape, dtype=parts[name].dtype).copy_(parts[name])
    parts[name] = _DAMAGES[kind](part, draw)
    return StoredMatrix(matrix.config, parts)


def damaged_file(raw: bytes, seed: int) -> bytes:
    """Return a file in the format safetensors that was cut, or whose header tells lies, as the seed says."""
    draw = random.Random(seed)
    length = int.from_bytes(raw[:8], "little")
    match draw.randrange(4):
        case 0:
            return raw[: draw.randrange(len(raw))]
        case 1:
            changed = bytearray(raw)
            for _ in range(3):
                changed[draw.randrange(8 + length)] = draw.choice(b'0123456789,"}\xff')
            return bytes(changed)
        case _:
            header = json.loads(raw[8 : 8 + length])
            _tell_lie(header, draw)
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            return len(text).to_bytes(8, "little") + text + raw[8 + length :]


def _tell_lie(header: dict[str, Any], draw: random.Random) -> None:
    """Change what the header of a file says of a tensor: its name, type, shape or place."""
    name = draw.choice(sorted(header))
    entry = header[name]
    match draw.randrange(5):
        case 0:
            header[draw.choice((name + "x", name.upper(), "m.weight", "m.bias"))] = header.pop(name)
        case 1:
            entry["dtype"] = draw.choice(("I32", "I64", "U8", "I8", "F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "I4"))
        case 2:
            entry["shape"] = draw.choice((entry["shape"][::-1], [*entry["shape"], 1], [1 << 40], [-1], [0], []))
        case 3:
            other = header[draw.choice(sorted(header))]
            entry["data_offsets"] = draw.choice((other["data_offsets"], [0, 0], [8, 1 << 50], [64, 0], [0, 1]))
        case _:
            entry["dtype"], entry["shape"] = draw.choice(
                (("U8", [entry["data_offsets"][1] - entry["data_offsets"][0]]), ("BF16", entry["shape"]))
            )


def _damaged_config(config: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Change one value, at any depth."""
    changed = copy.deepcopy(config)
    place = changed
    while True:
        key = draw.choice(sorted(place))
        if not isinstance(place[key], dict) or not place[key] or draw.random() < 0.3:
            place[key] = draw.choice(_ODD_VALUES)
            return changed
        place = place[key]


def _one_byte(part: Tensor, draw: random.Random, value: int) -> Tensor:
    raw = part.reshape(-1).clone().view(torch.uint8)
    if len(raw):
        raw[draw.randrange(len(raw))] = value
    return raw.view(part.dtype).reshape(part.shape)


def _one_number(part: Tensor, draw: random.Random, value: float) -> Tensor:
    if not part.is_floating_point():
        return _one_byte(part, draw, 255)
    flat = part.float().reshape(-1).clone()
    flat[draw.randrange(len(flat))] = value
    return flat.to(part.dtype).reshape(part.shape)


_DAMAGES: tuple[Callable[[Tensor, random.Random], Tensor], ...] = (
    lambda part, _: part.reshape(-1)[: max(1, part.numel() // 2)].clone(),
    lambda part, _: part.float()[None],
    lambda part, _: torch.zeros(0, dtype=part.dtype),
    lambda part, _: torch.cat((part.reshape(-1), part.reshape(-1))),
    lambda part, _: part.reshape(-1, 1).view(torch.uint8),
    lambda part, _: torch.cat((part, part)) if part.dim() else part.reshape(1, 1, 1),
    lambda part, draw: _one_byte(part, draw, 255),
    lambda part, draw: _one_byte(part, draw, 0x7F),
    lambda part, draw: _one_byte(part, draw, draw.randrange(256)),
    lambda part, draw: _one_number(part, draw, float("nan")),
    lambda part, draw: _one_number(part, draw, float("inf")),
    lambda part, draw: _one_number(part, draw, -3e38),
    lambda part, _: torch.full_like(part.float(), 3e38).to(part.dtype),
    lambda part, _: torch.zeros_like(part),
    lambda part, _: part.reshape(part.shape[::-1]).clone(),
    lambda part, _: part.mT.contiguous() if part.dim() > 1 else part[None].contiguous(),
    lambda part, draw: _one_index(part, draw),
    lambda part, draw: part.to(draw.choice((torch.int64, torch.int16))),
    lambda part, draw: part.to(draw.choice((torch.float64, torch.float32, torch.bfloat16, torch.float16))),
)


def _one_index(part: Tensor, draw: random.Random) -> Tensor:
    """Change an integer to one that no index or zero point may be, or may."""
    if part.is_floating_point() or not part.dim():
        return part
    flat = part.reshape(-1).clone()
    limits = torch.iinfo(part.dtype)
    flat[draw.randrange(len(flat))] = draw.choice((limits.min, limits.max, 4, 3, 0, max(-1, limits.min)))
    return flat.reshape(part.shape)


def _without(matrix: StoredMatrix, name: str, draw: random.Random) -> StoredMatrix:
    del matrix.parts[name]
    return matrix


def _renamed(matrix: StoredMatrix, name: str, draw: random.Random) -> StoredMatrix:
    matrix.parts[draw.choice((f"{name}s", name.replace("weight", "w"), "bias", "weight"))] = matrix.parts.pop(name)
    return matrix


def _exchanged(matrix: StoredMatrix, name: str, draw: random.Random) -> StoredMatrix:
    other = draw.choice(sorted(matrix.parts))
    matrix.parts[name], matrix.parts[other] = matrix.parts[other], matrix.parts[name]
    return matrix


def _with_other_value(matrix: StoredMatrix, name: str, draw: random.Random) -> StoredMatrix:
    return StoredMatrix(_damaged_config(matrix.config, draw), matrix.parts)


def _with_other_config(matrix: StoredMatrix, name: str, draw: random.Random) -> StoredMatrix:
    """The config of another format."""
    return StoredMatrix(MATRICES[draw.choice(sorted(MATRICES))]().config, matrix.parts)


_CHANGES = (_without, _renamed, _exchanged, _with_other_value, _with_other_config)
"""Changes of the whole, beside those of a part."""
