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
        # Bytes are blocks of that type already.
        raw = value if value.dtype == np.uint8 else gguf.quants.quantize(value, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
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


HALVES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (54,),
    "MXFP4": (),
    "NVFP4": (),
}
"""Types of blocks, and where numbers in half precision are in a block: random bits there would often be infinite."""


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, width: int, bits: int = 0x3B) -> np.ndarray:
    """Rows of random blocks of a type, [rows, bytes] uint8, whose scales are finite.

    Args:
        bits: that may be set in the upper byte of a number in half precision.
    """
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(kind).integers(0, 256, (rows, width // block, size), dtype=np.uint8)
    for at in HALVES[kind.name]:
        raw[..., at + 1] &= bits
    if kind is gguf.GGMLQuantizationType.MXFP4:
        raw[..., 0] = raw[..., 0] % 16 + 112
    if kind is gguf.GGMLQuantizationType.NVFP4:
        raw[..., :4] %= 0x7F
    return raw.reshape(rows, -1)
