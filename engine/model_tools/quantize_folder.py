"""Quantise a model's folder round-to-nearest, and write it in the format compressed-tensors.

Schemes, by their names in that package: w4a16, signed integers of 4 bits with a scale for each group of inputs; w8a8,
of 8 bits with a scale for each row; fp8, E4M3 with a scale for each row. Activations of the latter two are rounded by
servers that do so, each token by itself; this one takes them as they are. Linear modules of layers are quantised; the
embedding, the head, norms and routers stay as they are.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoint.quantization_config import FILES, KEY
from ..checkpoint.read_config import CONFIG, read_config_file, read_model_config
from ..checkpoint.safetensors_files import INDEX, shard_names
from ..errors import ConfigError, ModelError

Scheme = Literal["w4a16", "w8a8", "fp8"]
SCHEMES: Final = ("w4a16", "w8a8", "fp8")
_LINEAR: Final = re.compile(r"(^|\.)layers\.\d+\..*(proj|\.fc1|\.fc2)\.weight$")
_GROUPS: Final = (128, 64, 32)
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_FORMATS: Final[dict[Scheme, str]] = {"w4a16": "pack-quantized", "w8a8": "int-quantized", "fp8": "float-quantized"}
_LARGEST_FLOAT8: Final = 448.0

Progress = Callable[[str, int, int], None]
"""Called with a file's name, files done, and files in all."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """What was written: quantised modules, and bytes of weights before and after."""

    modules: int
    bytes_before: int
    bytes_after: int


def quantize_folder(folder: Path, out: Path, scheme: Scheme, progress: Progress | None = None) -> Quantised:
    """Write a quantised copy of a folder in Hugging Face format, which appears as a whole or not at all.

    Args:
        out: the new folder; it must not exist, or be empty.

    Raises:
        ModelError: the folder is malformed, its weights are quantised already, or no module fits the scheme.
        ConfigError: ``out`` has files.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--output: {out} is there and not empty. Name a new folder.")
    config = read_config_file(folder)
    if KEY in config:
        raise ModelError(f"{folder.name}: its weights are quantised already. Take the model as it was before.")
    read_model_config(folder)
    names = shard_names(folder)
    shapes = _shapes(folder, names)
    modules = sorted(name for name, shape in shapes.items() if _LINEAR.search(name) and len(shape) == 2)
    group = _group(modules, shapes) if scheme == "w4a16" else None
    if not modules:
        raise ModelError(f"{folder.name} has no linear modules that are known by their names (..._proj, fc1, fc2).")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        result = _write_weights(folder, work, names, frozenset(modules), scheme, group, progress)
        _copy_others(folder, work, names)
        ignored = sorted({"lm_head", *(_module(name) for name in shapes if _is_other_matrix(name, shapes, modules))})
        config[KEY] = quantization_config(scheme, group, ignored)
        (work / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if out.exists():
            out.rmdir()
        work.chmod(0o755)
        work.rename(out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return result


def quantization_config(scheme: Scheme, group: int | None, ignored: list[str]) -> dict[str, Any]:
    """Return what ``config.json`` says of the weights, as compressed-tensors writes it."""
    kind = "float" if scheme == "fp8" else "int"
    bits = 4 if scheme == "w4a16" else 8
    strategy = "group" if scheme == "w4a16" else "channel"
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "group_size": group}
    inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    groups = {
        "targets": ["Linear"],
        "weights": {**weights, "dynamic": False},
        "input_activations": None if scheme == "w4a16" else inputs,
        "output_activations": None,
        "format": _FORMATS[scheme],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[scheme],
        "quantization_status": "compressed",
        "config_groups": {"group_0": groups},
        "ignore": ignored,
    }


def quantised_parts(weight: Tensor, scheme: Scheme, group: int | None) -> dict[str, Tensor]:
    """Return the tensors of a quantised matrix [N, K] by the ends of their names; scales are of the weight's type.

    Raises:
        ValueError: the weight has numbers that are not finite.
    """
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("it has numbers that are not finite")
    width = weight.shape[1]
    parts = weight.float().unflatten(1, (-1, group or width))
    steps = {"w4a16": 7.5, "w8a8": 127.5, "fp8": _LARGEST_FLOAT8}[scheme]
    scales = (parts.abs().amax(-1) / steps).to(weight.dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    found = parts / scales.float()[..., None]
    if scheme == "fp8":
        numbers = found.clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).flatten(1).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale": scales}
    if scheme == "w8a8":
        return {"weight": found.round().clamp(-128, 127).flatten(1).to(torch.int8), "weight_scale": scales}
    numbers = (found.round().clamp(-8, 7) + 8).flatten(1).to(torch.int32)
    shifts = torch.arange(8, dtype=torch.int32) * 4
    words = (numbers.unflatten(1, (-1, 8)).long() << shifts).sum(-1)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


def _shapes(folder: Path, names: list[str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for shard in names:
        with safe_open(folder / shard, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def _group(modules: list[str], shapes: dict[str, tuple[int, ...]]) -> int:
    """Return the largest group that divides the inputs of all modules. Raises ModelError."""
    for group in _GROUPS:
        if all(shapes[name][1] % group == 0 for name in modules):
            return group
    odd = next(name for name in modules if shapes[name][1] % _GROUPS[-1])
    raise ModelError(f"{odd} has {shapes[odd][1]} inputs, not a multiple of {_GROUPS[-1]}: take --scheme w8a8 or fp8.")


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _is_other_matrix(name: str, shapes: dict[str, tuple[int, ...]], modules: list[str]) -> bool:
    return name.endswith(".weight") and len(shapes[name]) == 2 and name not in modules


def _write_weights(
    folder: Path,
    work: Path,
    names: list[str],
    modules: frozenset[str],
    scheme: Scheme,
    group: int | None,
    progress: Progress | None,
) -> Quantised:
    """Write the shards, one after the other, and their index."""
    places: dict[str, str] = {}
    before = after = 0
    for done, shard in enumerate(names):
        if progress:
            progress(shard, done, len(names))
        tensors: dict[str, Tensor] = {}
        with safe_open(folder / shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                before += tensor.nbytes
                tensors |= _written(name, tensor, scheme, group) if name in modules else {name: tensor}
        save_file(tensors, work / shard, metadata={"format": "pt"})
        after += sum(tensor.nbytes for tensor in tensors.values())
        places |= dict.fromkeys(tensors, shard)
    if len(names) > 1:
        index = {"metadata": {"total_size": after}, "weight_map": places}
        (work / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return Quantised(len(modules), before, after)


def _written(name: str, weight: Tensor, scheme: Scheme, group: int | None) -> dict[str, Tensor]:
    if weight.dtype not in _FLOATS:
        raise ModelError(f"The tensor {name} is stored as {weight.dtype}; it must be float32, bfloat16 or float16.")
    try:
        parts = quantised_parts(weight, scheme, group)
    except ValueError as error:
        raise ModelError(f"The tensor {name} cannot be quantised: {error}.") from error
    return {f"{_module(name)}.{part}": tensor.contiguous() for part, tensor in parts.items()}


def _copy_others(folder: Path, work: Path, names: list[str]) -> None:
    """Copy the tokenizer, templates and other texts; not weights in other formats, which would be the old ones."""
    kept = {".json", ".jinja", ".txt", ".model", ".md"}
    for path in folder.iterdir():
        if path.is_file() and path.suffix in kept and path.name not in (*names, INDEX, CONFIG, *FILES):
            shutil.copyfile(path, work / path.name)
