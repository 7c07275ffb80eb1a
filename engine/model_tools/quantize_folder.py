"""Quantise a model's folder by rounding to nearest, and write it in the format of compressed-tensors.

The schemes have these names in compressed-tensors:

- w4a16: signed integers of 4 bits with a scale for each group of inputs.
- w8a8: signed integers of 8 bits with a scale for each row.
- fp8: E4M3 with a scale for each row.
- nvfp4: E2M1 with a scale in E4M3 for each sixteen inputs, and one factor for all modules of a block that are often
  computed together.

The files of w8a8 and fp8 request that servers round activations too, separately for each token. This server does so
only for w8a8, on a CPU and in bfloat16. The linear modules of layers are quantised; the embedding, the head, norms and
routers are not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoint.quantization_config import FILES, KEY
from ..checkpoint.read_config import CONFIG, read_config_file, read_model_config
from ..checkpoint.safetensors_files import INDEX, shard_names
from ..errors import ConfigError, ModelError

Scheme = Literal["w4a16", "w8a8", "fp8", "nvfp4"]
SCHEMES: Final = ("w4a16", "w8a8", "fp8", "nvfp4")
_LINEAR: Final = re.compile(r"(^|\.)layers\.\d+\..*(proj|\.fc1|\.fc2)\.weight$")
_GROUPS: Final = (128, 64, 32)
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_FORMATS: Final[dict[Scheme, str]] = {
    "w4a16": "pack-quantized",
    "w8a8": "int-quantized",
    "fp8": "float-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}
_BITS: Final[dict[Scheme, int]] = {"w4a16": 4, "w8a8": 8, "fp8": 8, "nvfp4": 4}
_STRATEGIES: Final[dict[Scheme, str]] = {"w4a16": "group", "w8a8": "channel", "fp8": "channel", "nvfp4": "tensor_group"}
_LARGEST_FLOAT8: Final = 448.0
_LARGEST_FLOAT4: Final = 6.0
_NVFP4_GROUP: Final = 16


class Progress(Protocol):
    """Called with tensors done, and tensors in all."""

    def __call__(self, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Quantised:
    """Result of a quantisation: the quantised modules, and bytes of weights before and after."""

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
        raise ConfigError(f"--output: {out} exists and is not empty. Give a new folder.")
    config = read_config_file(folder)
    if KEY in config:
        raise ModelError(f"{folder.name}: its weights are already quantised. Use the model before its quantisation.")
    read_model_config(folder)
    names = shard_names(folder)
    shapes = _shapes(folder, names)
    modules = sorted(name for name, shape in shapes.items() if _LINEAR.search(name) and len(shape) == 2)
    group = _group(modules, shapes, scheme)
    if not modules:
        raise ModelError(f"{folder.name} has no linear modules that are known by their names (..._proj, fc1, fc2).")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        report = partial(progress, total=len(shapes)) if progress else _report_nothing
        result = _write_weights(folder, work, names, frozenset(modules), scheme, group, report)
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
    kind = "float" if scheme in ("fp8", "nvfp4") else "int"
    weights = {
        "num_bits": _BITS[scheme],
        "type": kind,
        "symmetric": True,
        "strategy": _STRATEGIES[scheme],
        "group_size": group,
    }
    inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    groups = {
        "targets": ["Linear"],
        "weights": {**weights, "dynamic": False},
        "input_activations": inputs if _BITS[scheme] == 8 else None,
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


def quantised_parts(weight: Tensor, scheme: Scheme, group: int | None, largest: float = 0.0) -> dict[str, Tensor]:
    """Return the tensors of a quantised matrix [N, K] by the suffixes of their names. Scales have the weight's dtype.

    Args:
        largest: largest magnitude of all matrices that share a factor, for nvfp4.

    Raises:
        ValueError: the weight has numbers that are not finite.
    """
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("it has numbers that are not finite")
    width = weight.shape[1]
    parts = weight.float().unflatten(1, (-1, group or width))
    if scheme == "nvfp4":
        return _nvfp4_parts(parts, largest)
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


def _nvfp4_parts(parts: Tensor, largest: float) -> dict[str, Tensor]:
    """Quantise groups of inputs [N, groups, 16] whose matrices' largest magnitude is ``largest``."""
    total = torch.tensor([_LARGEST_FLOAT8 * _LARGEST_FLOAT4 / (largest or 1.0)])
    scales = (total * parts.abs().amax(-1) / _LARGEST_FLOAT4).to(torch.float8_e4m3fn)
    factors = scales.float() / total
    magnitude = parts.abs() / torch.where(factors == 0, torch.ones_like(factors), factors)[..., None]
    # To the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6; halfway to the one whose last bit is 0.
    codes = torch.zeros_like(parts, dtype=torch.uint8)
    for index, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        codes += (magnitude > middle if index % 2 == 0 else magnitude >= middle).to(torch.uint8)
    flat = (codes | ((parts < 0) & (codes > 0)).to(torch.uint8) << 3).flatten(1)
    return {
        "weight_packed": flat[:, 0::2] | flat[:, 1::2] << 4,
        "weight_scale": scales,
        "weight_global_scale": total,
    }


def _block(name: str) -> str:
    """Return the block of a module, whose matrices are often computed together: ``model.layers.0.self_attn``."""
    return _module(name).rpartition(".")[0]


def _largest_of_blocks(folder: Path, names: list[str], modules: frozenset[str]) -> dict[str, float]:
    """Return the largest magnitude of each block's matrices."""
    largest: dict[str, float] = {}
    for shard in names:
        with safe_open(folder / shard, framework="pt") as file:
            for name in modules.intersection(file.keys()):
                found = float(file.get_tensor(name).abs().max())
                largest[_block(name)] = max(largest.get(_block(name), 0.0), found)
    return largest


def _report_nothing(done: int) -> None:
    pass


def _shapes(folder: Path, names: list[str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for shard in names:
        with safe_open(folder / shard, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def _group(modules: list[str], shapes: dict[str, tuple[int, ...]], scheme: Scheme) -> int | None:
    """Return the largest group of a scheme that divides the inputs of all modules, None for rows. Raises ModelError."""
    if _BITS[scheme] == 8:
        return None
    sizes = _GROUPS if scheme == "w4a16" else (_NVFP4_GROUP,)
    for group in sizes:
        if all(shapes[name][1] % group == 0 for name in modules):
            return group
    odd = next(name for name in modules if shapes[name][1] % sizes[-1])
    raise ModelError(f"{odd} has {shapes[odd][1]} inputs, not a multiple of {sizes[-1]}: use --scheme w8a8 or fp8.")


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
    report: Callable[[int], None],
) -> Quantised:
    """Write the shards, one after the other, and their index."""
    places: dict[str, str] = {}
    before = after = 0
    largest = _largest_of_blocks(folder, names, modules) if scheme == "nvfp4" else {}
    done = 0
    for shard in names:
        tensors: dict[str, Tensor] = {}
        with safe_open(folder / shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                before += tensor.nbytes
                tensors |= _written(name, tensor, scheme, group, largest) if name in modules else {name: tensor}
                done += 1
                report(done)
        _save(tensors, work / shard)
        after += sum(tensor.nbytes for tensor in tensors.values())
        places |= dict.fromkeys(tensors, shard)
    if len(names) > 1:
        index = {"metadata": {"total_size": after}, "weight_map": places}
        (work / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return Quantised(len(modules), before, after)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a shard. Raises OSError."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # The package tells an error of the system in words alone.
        if (found := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def _written(
    name: str, weight: Tensor, scheme: Scheme, group: int | None, largest: dict[str, float]
) -> dict[str, Tensor]:
    if weight.dtype not in _FLOATS:
        raise ModelError(f"The tensor {name} is stored as {weight.dtype}; it must be float32, bfloat16 or float16.")
    try:
        parts = quantised_parts(weight, scheme, group, largest.get(_block(name), 0.0))
    except ValueError as error:
        raise ModelError(f"The tensor {name} cannot be quantised: {error}.") from error
    return {f"{_module(name)}.{part}": tensor.contiguous() for part, tensor in parts.items()}


def _copy_others(folder: Path, work: Path, names: list[str]) -> None:
    """Copy the tokenizer, templates and other texts; not weights in other formats, which would be the old ones."""
    kept = {".json", ".jinja", ".txt", ".model", ".md"}
    for path in folder.iterdir():
        if path.is_file() and path.suffix in kept and path.name not in (*names, INDEX, CONFIG, *FILES):
            shutil.copyfile(path, work / path.name)
