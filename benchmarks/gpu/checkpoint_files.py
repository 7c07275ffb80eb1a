"""Checkpoints of random weights, as they are published: models, an EAGLE-3 head, a model with an MTP module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu.engine_runs import Shape
from benchmarks.gpu.measure import Machine

MTP = "model.mtp_layers.0"
HEAD_VOCABULARY = 32_000
"""Tokens of a published EAGLE-3 head, fewer than its model has."""
_NORMS = ("input_layernorm", "post_attention_layernorm")
_BIASED = ("q_proj", "k_proj", "v_proj")


def write_model(folder: Path, shape: Shape, machine: Machine) -> Path:
    """Write a Llama of random weights with a tokenizer of bytes. Returns its folder."""
    folder.mkdir()
    shape.write(folder)
    write_tokenizer(folder, shape.vocab)
    save_file(_weights(shape, machine), folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer of bytes, whose further tokens are of no use."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [f"<{number}>" for number in range(len(texts), vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_mtp_model(folder: Path, shape: Shape, machine: Machine) -> Path:
    """Write a model in the form of MiMo, with one MTP module, which shares embedding and head. Returns its folder."""
    folder.mkdir()
    more = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    _write_config(shape.write(folder), more | {"num_nextn_predict_layers": 1})
    tensors = _weights(shape, machine) | _layer(MTP, shape, machine)
    for layer in (*(f"model.layers.{layer}" for layer in range(shape.layers)), MTP):
        for name in _BIASED:
            _, outputs = shape.projections[f"self_attn.{name}"]
            tensors[f"{layer}.self_attn.{name}.bias"] = torch.zeros(outputs, dtype=machine.dtype)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    tensors |= {f"{MTP}.{name}.weight": _norm(shape, machine) for name in norms}
    tensors[f"{MTP}.input_proj.weight"] = _matrix(2 * shape.hidden, shape.hidden, machine)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_draft_head(folder: Path, shape: Shape, machine: Machine) -> Path:
    """Write an EAGLE-3 head of a model of this shape, with its model's embedding. Returns its folder."""
    folder.mkdir()
    read = sorted({min(2, shape.layers - 1), shape.layers // 2, max(shape.layers - 3, 0)})
    vocab = min(HEAD_VOCABULARY, shape.vocab - 1)
    more: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    more |= {"draft_vocab_size": vocab, "eagle_config": {"eagle_aux_hidden_state_layer_ids": read}}
    _write_config(shape.write(folder), more)
    tensors = _layer("midlayer", shape, machine)
    for name in _BIASED:  # each reads a token's embedding and a hidden state side by side
        _, outputs = shape.projections[f"self_attn.{name}"]
        tensors[f"midlayer.self_attn.{name}.weight"] = _matrix(2 * shape.hidden, outputs, machine)
    tensors["midlayer.hidden_norm.weight"] = _norm(shape, machine)
    tensors["fc.weight"] = _matrix(len(read) * shape.hidden, shape.hidden, machine)
    tensors["norm.weight"] = _norm(shape, machine)
    tensors["lm_head.weight"] = _matrix(shape.hidden, vocab, machine)
    tensors["d2t"] = torch.zeros(vocab, dtype=torch.int64)  # the model's first tokens
    save_file(tensors, folder / "model.safetensors")
    return folder


def _write_config(folder: Path, more: Mapping[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))


def _weights(shape: Shape, machine: Machine) -> dict[str, Tensor]:
    tensors = {
        f"{name}.weight": _matrix(shape.hidden, shape.vocab, machine) for name in ("model.embed_tokens", "lm_head")
    }
    tensors["model.norm.weight"] = _norm(shape, machine)
    for layer in range(shape.layers):
        tensors |= _layer(f"model.layers.{layer}", shape, machine)
    return tensors


def _layer(prefix: str, shape: Shape, machine: Machine) -> dict[str, Tensor]:
    norms = {f"{prefix}.{name}.weight": _norm(shape, machine) for name in _NORMS}
    return norms | {
        f"{prefix}.{module}.weight": _matrix(*sizes, machine) for module, sizes in shape.projections.items()
    }


def _matrix(inputs: int, outputs: int, machine: Machine) -> Tensor:
    return machine.randn(outputs, inputs).mul_(float(inputs) ** -0.5).cpu()


def _norm(shape: Shape, machine: Machine) -> Tensor:
    return torch.ones(shape.hidden, dtype=machine.dtype)
