"""The table of weight forms on the documentation's page on models: what the code keeps of each, on each device."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rootgraft.engine.checkpoint.gguf import TENSOR_TYPES
from rootgraft.engine.checkpoint.quantization_config import read_quantization
from rootgraft.engine.loading.gguf_numbers import GROUPED_TYPES, grouped_bits
from rootgraft.engine.loading.gguf_repacked import kept_as
from rootgraft.engine.loading.quantised_tensors import QuantisedTensor, View, usual_part
from rootgraft.kernels.grouped_weights import pack_grouped
from rootgraft.kernels.quantised_weights import BLOCK_SIZES
from support.models.quantised_parts import MATRICES, ROWS, WIDTH, StoredMatrix

_ROOT: Final = Path(__file__).parents[3]
_TIMES: Final = _ROOT / "benchmarks/results/2026-11-29-weight-forms.json"
_MEASURED: Final = {"8 bits": "8 bits of rows", "FP8": "FP8 of rows"}
_CPU: Final = torch.device("cpu")
_HEAD: Final = """| stored as | bits | kept on a CPU | time of a row there | kept on a GPU, bits | adapters |
|---|---|---|---|---|---|"""

Row = tuple[str, str, str, str, str]
"""Bits in the file, what a CPU keeps, its time, what a GPU keeps, whether adapters are taken."""


def forms_table() -> str:
    """Return the table in Markdown; forms that are alike in all columns share a row."""
    rows: dict[Row, list[str]] = {}
    for name, block, size in TENSOR_TYPES.values():
        if block > 1:
            rows.setdefault(_gguf_row(name, 8 * size / block), []).append(f"GGUF {name}")
    for name, make in MATRICES.items():
        rows.setdefault(_folder_row(make()), []).append(name)
    return "\n".join([_HEAD, *(f"|{', '.join(names)}|{'|'.join(row)}|" for row, names in rows.items())]) + "\n"


def _gguf_row(name: str, bits: float) -> Row:
    other = kept_as(name)
    is_kept = name in BLOCK_SIZES or name == "MXFP4" or other == "IQ2"
    cpu = "blocks" if is_kept else f"as {other}" if other else "widened"
    gpu = f"{grouped_bits(name):.1f}" if name in GROUPED_TYPES else "widened"
    return f"{bits:.1f}", cpu, _time(other or (name if is_kept else "bfloat16")), gpu, "yes"


def _folder_row(matrix: StoredMatrix) -> Row:
    quantization = read_quantization({"quantization_config": matrix.config})
    scheme = quantization.scheme("m") if quantization else None
    assert scheme is not None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "parts.safetensors"
        save_file({name: _as_written(name, part) for name, part in matrix.parts.items()}, file)
        opened = safe_open(file, framework="pt")
        parts = {usual_part(f"m.{name}", quantization).removeprefix("m."): View(opened, name) for name in matrix.parts}
        tensor = QuantisedTensor("m.weight", scheme, parts)
        blocks, numbers = tensor.block_type, tensor.numbers()
        packed = None if numbers is None else pack_grouped([numbers], _CPU, torch.bfloat16)
    is_float = scheme.layout.startswith("float8")
    cpu = ("FP8" if is_float else "8 bits") if tensor.byte_scales else "blocks" if blocks else "widened"
    time = _time(_MEASURED[cpu] if tensor.byte_scales else blocks or "bfloat16")
    gpu = "widened" if packed is None else str(math.floor(packed.nbytes * 8 / (ROWS * WIDTH)))
    return str(scheme.bits), cpu, time, gpu, "yes"


def _as_written(name: str, part: Tensor) -> Tensor:
    """Return a part with scales in half precision, as tools store them for models in it."""
    return (part.half() if name == "weight_scale" and part.dtype is torch.float32 else part).contiguous()


def _time(form: str) -> str:
    """Return the time of a product of one row in a form as a multiple of that in bfloat16, "-" if not measured."""
    times = json.loads(_TIMES.read_text())["milliseconds"]["1"]
    return f"{times[form] / times['bfloat16']:.1f}" if form in times else "-"
