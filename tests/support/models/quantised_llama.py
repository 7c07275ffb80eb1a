"""A tiny Llama whose matrices are stored in any of the quantised forms, and the bytes that a loaded model holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from support.models.quantised_oracle import matrix_meant
from support.models.quantised_parts import MATRICES, ROWS, WIDTH
from support.models.small_gguf import HIDDEN, SHAPES, VOCAB, write


def save_quantised(form: str, folder: Path) -> LlamaForCausalLM:
    """Write a folder whose projections of shape [ROWS, WIDTH] are in a form; returns the model with what they mean.

    Scales of the schemes of compressed-tensors are in half precision, as its tools store them for models in it.
    """
    config = LlamaConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=ROWS, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, head_dim=ROWS // 4,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    stored = {name: each.clone() for name, each in model.state_dict().items()}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or module.weight.shape != (ROWS, WIDTH):
            continue
        matrix = MATRICES[form]()
        scale = matrix.parts.get("weight_scale")
        if scale is not None and scale.dtype is torch.float32:
            matrix.parts["weight_scale"] = scale.half()
        config.quantization_config = matrix.config
        del stored[f"{name}.weight"]
        stored |= {f"{name}.{part}": each.contiguous() for part, each in matrix.parts.items()}
        module.weight.data = torch.from_numpy(matrix_meant(matrix.config, matrix.parts)).float()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors")
    return model


def write_blocks(
    path: Path,
    kind: gguf.GGMLQuantizationType,
    width: int = 256,
    others: Mapping[str, gguf.GGMLQuantizationType] = MappingProxyType({}),
) -> Path:
    """Write a GGUF file of one layer, whose matrices, [width, width], are in one type but for ``others``; all zero."""
    shapes = {
        name: (VOCAB, width) if name in ("token_embd.weight", "output.weight") else (width,) * len(shape)
        for name, shape in (SHAPES | {"output.weight": (VOCAB, HIDDEN)}).items()
    }
    types = {name: others.get(name, kind) for name, shape in shapes.items() if len(shape) == 2}
    content = {
        name: _zeros(types[name], *shape) if name in types else np.ones(shape, "f4") for name, shape in shapes.items()
    }
    sizes = {"embedding_length": width, "feed_forward_length": width, "attention__head_count_kv": 4}
    return write(path, content, types=types, **sizes)


def _zeros(kind: gguf.GGMLQuantizationType, rows: int, width: int) -> np.ndarray:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    zero = 120 if kind is gguf.GGMLQuantizationType.MXFP4 else 0  # a scale of MXFP4 is an exponent
    return np.full((rows, width // block * block_bytes), zero, np.uint8)


def held_bytes(model: Any) -> int:
    """Return the bytes of all tensors of a model, each storage once."""
    return sum(_storages(model).values())


def _storages(value: Any) -> dict[int, int]:
    """Return the bytes of storages by their addresses."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    parts = value if isinstance(value, (tuple, list)) else _parts(value)
    return {address: size for part in parts for address, size in _storages(part).items()}


def _parts(value: Any) -> list[Any]:
    return [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else []
