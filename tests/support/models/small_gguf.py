"""One-layer GGUF files with random tensors and any metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, VOCAB = 64, 32
SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (32, HIDDEN),
    "blk.0.attn_v.weight": (32, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate.weight": (96, HIDDEN),
    "blk.0.ffn_up.weight": (96, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, 96),
}
METADATA: dict[str, Any] = {
    "context_length": 128,
    "embedding_length": HIDDEN,
    "block_count": 1,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
Tensors = dict[str, np.ndarray]


def tensors(shapes: dict[str, tuple[int, ...]] = SHAPES) -> Tensors:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write(
    path: Path,
    content: Tensors,
    *,
    architecture: str = "llama",
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    **metadata: Any,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (METADATA | {name.replace("__", "."): value for name, value in metadata.items()}).items():
        _add(writer, key if key.startswith("tokenizer.") else f"{architecture}.{key}", value)
    for name, value in content.items():
        kind = (types or {}).get(name, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](key, value)
