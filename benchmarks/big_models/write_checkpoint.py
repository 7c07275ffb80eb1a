"""Write a checkpoint with random weights, tensor by tensor: a folder in Hugging Face format, or a GGUF file.

Its tokenizer is the default model's, with as many unused tokens behind it as the shape's vocabulary has more. A GGUF
file's matrices have the types that llama.cpp's quantiser chooses: the head, or the embedding tied to it, has six bits
beside others of four, and "Q4_K_M" has six bits in half of the value and down projections.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.big_models.random_blocks import Bytes, random_tensor, upper_half
from rootgraft.engine.checkpoint.gguf import GgufFile
from rootgraft.engine.checkpoint.locate import resolve_model
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.loading.tensor_names import expected_shapes
from rootgraft.engine.text.tokenizer_gguf import read_gguf

GGUF_KINDS = ("BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K_M")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_UNUSED = 5  # tokenizer.ggml.token_type
_TOKENIZER = "tokenizer."


def write_folder(folder: Path, shape: dict[str, Any]) -> None:
    """Write a folder in Hugging Face format, in bfloat16."""
    shapes = _write_config(folder, shape)
    _write_tokenizer(folder, shape["vocab_size"])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dims in shapes.items():
        end = offset + 2 * int(np.prod(dims))
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, dims in shapes.items():
            _values(name, "BF16", dims).tofile(file)


def write_gguf(path: Path, shape: dict[str, Any], kind: str) -> None:
    """Write a GGUF file of one of ``GGUF_KINDS``."""
    scratch = path.with_suffix(".config")
    shapes = _write_config(scratch, shape)
    writer = gguf.GGUFWriter(path, shape["model_type"])
    _add_metadata(writer, shape)
    tensors = [(name, _gguf_name(name), _type(name, dims, kind, shape), dims) for name, dims in shapes.items()]
    for _, stored, type_name, dims in tensors:
        raw_type = gguf.GGMLQuantizationType[type_name]
        *rows, columns = gguf.quant_shape_to_byte_shape(dims, raw_type)
        size = int(np.prod(rows)) * columns
        writer.add_tensor_info(stored, (*rows, columns), np.dtype(np.uint8), size, raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, _, type_name, dims in tensors:
        writer.write_tensor_data(_values(name, type_name, dims))
    writer.close()
    (scratch / "config.json").unlink()
    scratch.rmdir()


def _write_config(folder: Path, shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Write the config, and return the shapes of the tensors that it needs."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {key: value for key, value in _special_ids().items() if key in ("bos_token_id", "eos_token_id")}
    (folder / "config.json").write_text(json.dumps(shape | ids))
    return expected_shapes(read_model_config(folder))


def _special_ids() -> dict[str, int]:
    metadata = _default_model().metadata
    return {f"{name}_token_id": int(metadata[f"tokenizer.ggml.{name}_token_id"]) for name in ("bos", "eos")}


def _default_model() -> GgufFile:
    return GgufFile.open(resolve_model(None).path)


def _unused(count: int, vocab_size: int) -> Iterator[str]:
    return (f"[unused{number}]" for number in range(count, vocab_size))


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    tokenizer = read_gguf(resolve_model(None).path)
    vocabulary = tokenizer.definition["model"]["vocab"]
    vocabulary |= {text: number for number, text in enumerate(_unused(len(vocabulary), vocab_size), len(vocabulary))}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.definition))
    [template] = tokenizer.chat_templates.values()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **tokenizer.special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _add_metadata(writer: gguf.GGUFWriter, shape: dict[str, Any]) -> None:
    heads = shape["num_attention_heads"]
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    metadata = _default_model().metadata
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"].tolist()
    unused = list(_unused(len(tokens), shape["vocab_size"]))
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(tokens + unused)
    writer.add_token_types(types + [_UNUSED] * len(unused))
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    ids = _special_ids()
    writer.add_bos_token_id(ids["bos_token_id"])
    writer.add_eos_token_id(ids["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(metadata["tokenizer.chat_template"])


def _gguf_name(name: str) -> str:
    whole = {_EMBEDDING: "token_embd.weight", _HEAD: "output.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, ending = rest.rpartition(".")
    return f"blk.{layer}.{_MODULES[module]}.{ending}"


def _type(name: str, dims: tuple[int, ...], kind: str, shape: dict[str, Any]) -> str:
    """Return the type of a tensor in a file of a kind."""
    if len(dims) == 1:
        return "F32"
    if kind in ("BF16", "Q8_0"):
        return kind
    if name == (_EMBEDDING if shape["tie_word_embeddings"] else _HEAD):
        return "Q6_K"
    if kind != "Q4_K_M":
        return kind
    has_more = name.endswith(("v_proj.weight", "down_proj.weight")) and _has_more_bits(name, shape)
    return "Q6_K" if has_more else "Q4_K"


def _has_more_bits(name: str, shape: dict[str, Any]) -> bool:
    """Whether a layer is one of those with more bits: the first and the last eighth, and every third between."""
    layer, count = int(name.split(".")[2]), shape["num_hidden_layers"]
    return layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2


def _values(name: str, kind: str, dims: tuple[int, ...]) -> Bytes:
    """Return a tensor as it is stored; vectors are ones, or zeros where they are biases."""
    if len(dims) == 1:
        vector = np.full(dims, 0.0 if name.endswith("bias") else 1.0, np.float32)
        return vector.view(np.uint8) if kind == "F32" else upper_half(vector)
    random = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
    return random_tensor(kind, *dims, random)
