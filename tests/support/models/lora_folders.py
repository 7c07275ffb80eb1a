"""Adapter folders written by hand, byte by byte, for a base of two small projections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rootgraft.lora.base_projections import EMBEDDING, BaseLayout, ProjectionShape
from rootgraft.lora.read_adapter import AdapterReader

HIDDEN, OUT, VOCAB = 6, 4, 10
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
DOWN = "model.layers.1.mlp.down_proj"
SHAPES = (
    ProjectionShape((Q, K), (HIDDEN, OUT), HIDDEN),
    ProjectionShape((DOWN,), (HIDDEN,), OUT),
    ProjectionShape((EMBEDDING,), (HIDDEN,), VOCAB),
    ProjectionShape(("lm_head",), (VOCAB,), HIDDEN),
)
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.int8: "I8"}


NORM = "model.layers.0.input_layernorm"


def small_layout(dtype: torch.dtype = torch.float32) -> BaseLayout:
    """A base whose k has a bias, and with one norm."""
    return BaseLayout(SHAPES, dtype, torch.device("cpu"), base_weight, base_bias, norms={NORM: (HIDDEN,)})


def base_bias(module: str) -> Tensor | None:
    return torch.ones(OUT) if module == K else None


def base_weight(module: str) -> Tensor:
    shape = (
        (VOCAB, HIDDEN) if module in (EMBEDDING, "lm_head") else (HIDDEN, OUT) if module == DOWN else (HIDDEN, HIDDEN)
    )
    shape = (OUT, HIDDEN) if module == K else shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(module)))


def small_reader(root: Path | None = None, dtype: torch.dtype = torch.float32) -> AdapterReader:
    return AdapterReader(small_layout(dtype), max_rank=8, max_file_bytes=2 << 20, root=root)


def good_config(**changes: Any) -> dict[str, Any]:
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "down_proj"],
        "bias": "none",
    }
    return {**fields, **changes}


def key(module: str, part: str) -> str:
    return f"base_model.model.{module}.{part}"


def good_tensors(seed: int = 0, rank: int = 2) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        key(Q, "lora_A.weight"): torch.randn(rank, HIDDEN, generator=g),
        key(Q, "lora_B.weight"): torch.randn(HIDDEN, rank, generator=g),
        key(DOWN, "lora_A.weight"): torch.randn(rank, OUT, generator=g),
        key(DOWN, "lora_B.weight"): torch.randn(HIDDEN, rank, generator=g),
    }


def header_of(tensors: dict[str, Tensor]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    return header


def body_of(tensors: dict[str, Tensor]) -> bytes:
    return b"".join(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()) for tensor in tensors.values())


def file_of(tensors: dict[str, Tensor], header: dict[str, Any] | bytes | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header or header_of(tensors)).encode()
    return len(text).to_bytes(8, "little") + text + body_of(tensors)


def write_folder(folder: Path, config: dict[str, Any] | bytes | None = None, data: bytes | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, bytes) else json.dumps(config or good_config()).encode()
    (folder / "adapter_config.json").write_bytes(text)
    (folder / "adapter_model.safetensors").write_bytes(file_of(good_tensors()) if data is None else data)
    return folder
