"""Malformed, hostile and unsupported adapter folders, each with a pattern that its error must match."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rootgraft.lora.base_projections import EMBEDDING
from support.models.lora_folders import (
    DOWN,
    HIDDEN,
    NORM,
    OUT,
    VOCAB,
    K,
    Q,
    base_weight,
    file_of,
    good_config,
    good_tensors,
    header_of,
    key,
    write_folder,
)

A, B = key(Q, "lora_A.weight"), key(Q, "lora_B.weight")


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: void(write_folder(folder, good_config(**changes)))


def config_text(text: bytes) -> Callable[[Path], None]:
    return lambda folder: void(write_folder(folder, text))


def data(content: bytes) -> Callable[[Path], None]:
    return lambda folder: void(write_folder(folder, None, content))


def tensors(fields: dict[str, Any] | None = None, **changes: Tensor | None) -> Callable[[Path], None]:
    """The good adapter with other config fields; A, B, ... in ``changes`` are q's tensors, None to leave one out."""
    found: dict[str, Tensor | None] = {**good_tensors(), **{NAMES.get(name, name): t for name, t in changes.items()}}
    content = file_of({name: tensor for name, tensor in found.items() if tensor is not None})
    return lambda folder: void(write_folder(folder, good_config(**(fields or {})), content))


NAMES = {
    "A": A,
    "B": B,
    "bias": key(Q, "lora_B.bias"),
    "magnitude": key(Q, "lora_magnitude_vector"),
    "q_bias": key(Q, "base_layer.bias"),
    "k_bias": key(K, "bias"),
    "k_base_bias": key(K, "base_layer.bias"),
    "head": key("lm_head", "weight"),
    "embed": key(EMBEDDING, "weight"),
    "base_embed": key(EMBEDDING, "base_layer.weight"),
    "delta": key(EMBEDDING, "token_adapter.trainable_tokens_delta"),
    "norm": key(NORM, "weight"),
    "embed_A": key(EMBEDDING, "lora_embedding_A"),
    "embed_B": key(EMBEDDING, "lora_embedding_B"),
}


def entry(**changes: Any) -> Callable[[Path], None]:
    """The good file, whose header says something else of q's A."""
    found = good_tensors()
    header = header_of(found)
    header[A].update(changes)
    return data(file_of(found, header))


def header_text(text: bytes, length: int | None = None) -> Callable[[Path], None]:
    size = len(text) if length is None else length
    return data(size.to_bytes(8, "little") + text)


def void(_: object) -> None:
    return None


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (write_folder(folder) / name).unlink()


def only_pickle(folder: Path) -> None:
    (write_folder(folder) / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def link_out(folder: Path) -> None:
    write_folder(folder.parent.parent / "outside")
    folder.symlink_to(folder.parent.parent / "outside")


def file_link_out(folder: Path) -> None:
    write_folder(folder)
    outside = folder.parent.parent / "outside_file"
    (folder / "adapter_model.safetensors").rename(outside)
    (folder / "adapter_model.safetensors").symlink_to(outside)


def a_folder_as_file(folder: Path) -> None:
    remove("adapter_config.json")(folder)
    (folder / "adapter_config.json").mkdir()


GOOD = good_tensors()
BIG = 1 << 32
DEEP = b"[" * 100_000 + b"]" * 100_000
SAVED = {"modules_to_save": ["lm_head"]}
EMBED = {"target_modules": ["q_proj", "down_proj", "embed_tokens"]}
EMBED_TENSORS = {"embed_A": torch.ones(2, VOCAB), "embed_B": torch.ones(HIDDEN, 2)}
# id -> what is written, and what the error must name.
CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    # the folder
    "no folder": (lambda folder: None, "no folder"),
    "no config": (remove("adapter_config.json"), "adapter_config.json"),
    "no weights": (remove("adapter_model.safetensors"), "adapter_model.safetensors"),
    "only a pickle": (only_pickle, "pickle"),
    "config is a folder": (a_folder_as_file, "adapter_config.json"),
    "a link out of the root": (link_out, "outside"),
    "a file that is a link out of the root": (file_link_out, "outside"),
    # the config as JSON
    "config empty": (config_text(b" "), "malformed"),
    "config no JSON": (config_text(b"{not json"), "malformed"),
    "config no UTF-8": (config_text(b'{"r": "\xff\xfe"}'), "malformed"),
    "config a list": (config_text(b"[]"), "JSON object"),
    "config nested deeply": (config_text(DEEP), "nested"),
    "config too long": (config_text(b"{" + b" " * (1 << 20) + b"}"), "bytes"),
    "config with a key twice": (config_text(b'{"peft_type": "LORA", "r": 1, "r": 2}'), "twice"),
    "config with NaN": (config_text(b'{"peft_type": "LORA", "lora_alpha": NaN}'), "NaN"),
    "config with Infinity": (config_text(b'{"peft_type": "LORA", "lora_alpha": -Infinity}'), "Infinity"),
    # the config's values
    "no peft_type": (config_text(b"{}"), "peft_type"),
    "another peft_type": (config(peft_type="IA3"), "peft_type"),
    "another task": (config(task_type="TASK"), "task_type"),
    "rank 0": (config(r=0), "r must"),
    "rank negative": (config(r=-2), "r must"),
    "rank a text": (config(r="2"), "r must"),
    "rank true": (config(r=True), "r must"),
    "rank not the tensors'": (config(r=3), "shape"),
    "rank above the most": (tensors({"r": 9}, A=torch.ones(9, HIDDEN), B=torch.ones(HIDDEN, 9)), "max-lora-rank"),
    "rank_pattern above the most": (
        tensors({"rank_pattern": {"q_proj": 9}}, A=torch.ones(9, HIDDEN), B=torch.ones(HIDDEN, 9)),
        "max-lora-rank",
    ),
    "alpha 0": (config(lora_alpha=0), "lora_alpha"),
    "alpha negative": (config(lora_alpha=-1), "lora_alpha"),
    "alpha 1e38": (config(lora_alpha=1e38), "lora_alpha"),
    "alpha 1e400": (config_text(b'{"peft_type": "LORA", "lora_alpha": 1e400}'), "lora_alpha"),
    "alpha a text": (config(lora_alpha="16"), "lora_alpha"),
    "alpha a long number": (config(lora_alpha=10**400), "lora_alpha"),
    "rank_pattern not the tensors'": (config(rank_pattern={"q_proj": 1}), "shape"),
    "rank_pattern a list": (config(rank_pattern=["q_proj"]), "rank_pattern"),
    "rank_pattern with rank 0": (config(rank_pattern={"q_proj": 0}), "rank_pattern"),
    "rank_pattern with a broken pattern": (config(rank_pattern={"q_(proj": 2}), "rank_pattern"),
    "rank_pattern with look-ahead": (config(rank_pattern={"(?=q)q_proj": 2}), "look-around"),
    "rank_pattern too long": (config(rank_pattern={"q" * 600: 2}), "rank_pattern"),
    "alpha_pattern with 0": (config(alpha_pattern={"q_proj": 0}), "alpha_pattern"),
    "alpha_pattern with a text": (config(alpha_pattern={"q_proj": "x"}), "alpha_pattern"),
    "alpha_pattern with too many entries": (config(alpha_pattern={f"m{i}": 1 for i in range(4097)}), "alpha_pattern"),
    "alpha_pattern with too many expressions": (config(alpha_pattern={f"m{i}.*": 1 for i in range(65)}), "expressions"),
    "use_rslora a text": (config(use_rslora="yes"), "use_rslora"),
    "use_dora a number": (config(use_dora=1), "use_dora"),
    "target_modules a number": (config(target_modules=3), "target_modules"),
    "target_modules of other types": (config(target_modules=[1]), "target_modules"),
    "target_modules without q": (config(target_modules=["down_proj"]), "target_modules"),
    "exclude_modules with q": (config(exclude_modules=["q_proj"]), "exclude_modules"),
    "layers_to_transform a text": (config(layers_to_transform="all"), "layers_to_transform"),
    "layers_to_transform negative": (config(layers_to_transform=[-1]), "layers_to_transform"),
    "layers_to_transform another": (config(layers_to_transform=[1]), "layers_to_transform"),
    "invocation tokens empty": (config(alora_invocation_tokens=[]), "alora_invocation_tokens"),
    "invocation tokens negative": (config(alora_invocation_tokens=[-1]), "alora_invocation_tokens"),
    "invocation tokens too large": (config(alora_invocation_tokens=[1 << 31]), "alora_invocation_tokens"),
    "invocation tokens too many": (config(alora_invocation_tokens=[1] * 2000), "alora_invocation_tokens"),
    "invocation tokens a text": (config(alora_invocation_tokens="<think>"), "alora_invocation_tokens"),
    # options that are not computed
    "bias all without the biases": (config(bias="all"), "bias of model.layers.0.self_attn.k_proj"),
    "bias some": (config(bias="some"), "bias must"),
    "a bias though bias is none": (tensors(k_bias=torch.ones(OUT)), "bias = 'none'"),
    "a bias of a module without LoRA": (tensors({"bias": "lora_only"}, k_bias=torch.ones(OUT)), "'lora_only'"),
    "a bias of another size": (tensors({"bias": "all"}, k_bias=torch.ones(OUT + 1)), "shape"),
    "a bias that the base has not": (
        tensors({"bias": "all"}, k_bias=torch.ones(OUT), q_bias=torch.ones(HIDDEN)),
        "base model has none",
    ),
    "a bias twice": (tensors({"bias": "all"}, k_bias=torch.ones(OUT), k_base_bias=torch.ones(OUT)), "the same module"),
    "modules_to_save": (config(modules_to_save=["lm_head"]), "modules_to_save"),
    "modules_to_save a text": (config(modules_to_save="lm_head"), "modules_to_save must"),
    "modules_to_save an empty name": (config(modules_to_save=[""]), "empty name"),
    "modules_to_save of a linear": (tensors({"modules_to_save": ["k_proj"]}), "the only whole matrices"),
    "modules_to_save of an activated": (
        config(modules_to_save=["layernorm"], alora_invocation_tokens=[1]),
        "modules_to_save and alora",
    ),
    "a whole linear": (tensors(**{key(K, "weight"): torch.ones(OUT, HIDDEN)}), "k_proj.weight that is not this base"),
    "a head of another width": (tensors(SAVED, head=torch.ones(VOCAB, HIDDEN + 1)), "lm_head.weight has shape"),
    "a head of too many tokens": (tensors(SAVED, head=torch.ones(VOCAB + 4097, HIDDEN)), "at most 4,096"),
    "a head with more tokens than the embedding": (
        tensors(SAVED, head=torch.ones(VOCAB + 1, HIDDEN)),
        "save model.embed_tokens",
    ),
    "an embedding with less tokens than the head": (
        tensors(SAVED, head=torch.ones(VOCAB, HIDDEN), embed=torch.ones(VOCAB - 1, HIDDEN)),
        "embed_tokens has 9 tokens, but its lm_head has 10",
    ),
    "an embedding twice": (
        tensors(embed=torch.ones(VOCAB, HIDDEN), base_embed=torch.ones(VOCAB, HIDDEN)),
        "the same module",
    ),
    "a norm of another size": (
        tensors({"modules_to_save": ["layernorm"]}, norm=torch.ones(HIDDEN + 1)),
        "input_layernorm.weight has shape",
    ),
    "a norm that is not named": (tensors(norm=torch.ones(HIDDEN)), "modules_to_save does not name"),
    "a norm that is not there": (tensors({"modules_to_save": ["layernorm"]}), "has no tensor"),
    "trainable_token_indices": (config(trainable_token_indices=[1]), "trainable_token_indices"),
    "trainable_token_indices a text": (config(trainable_token_indices="1"), "trainable_token_indices must"),
    "trainable_token_indices twice": (config(trainable_token_indices=[1, 1]), "different token ids"),
    "trainable_token_indices negative": (config(trainable_token_indices=[-1]), "different token ids"),
    "trainable_token_indices of a linear": (config(trainable_token_indices={"q_proj": [1]}), "q_proj"),
    "trainable_token_indices of too many": (
        config(trainable_token_indices=list(range(65_537))),
        "65,536 different token ids",
    ),
    "rows without their tokens": (tensors(delta=torch.ones(2, HIDDEN)), "trainable_token_indices does not name"),
    "rows of another number": (
        tensors({"trainable_token_indices": [1]}, delta=torch.ones(2, HIDDEN)),
        "1 tokens, so it must be",
    ),
    "rows beyond the vocabulary": (
        tensors({"trainable_token_indices": [VOCAB]}, delta=torch.ones(1, HIDDEN)),
        "tokens 0 to 9",
    ),
    "rows and LoRA of the embedding": (
        tensors({**EMBED, "trainable_token_indices": [1]}, **EMBED_TENSORS, delta=torch.ones(1, HIDDEN)),
        "no such combination",
    ),
    "layer_replication": (config(layer_replication=[[0, 2]]), "layer_replication"),
    "target_parameters": (config(target_parameters=["experts"]), "target_parameters"),
    "use_qalora": (config(use_qalora=True), "use_qalora"),
    "use_bdlora": (config(use_bdlora={"nblocks": 2}), "use_bdlora"),
    "kasa_config": (config(kasa_config={"beta": 1e-4}), "kasa_config"),
    "arrow_config": (config(arrow_config={"top_k": 2}), "arrow_config"),
    "megatron_config": (config(megatron_config={"a": 1}), "megatron_config"),
    "ensure_weight_tying a text": (config(ensure_weight_tying="yes"), "ensure_weight_tying"),
    "init pissa": (config(init_lora_weights="pissa_niter_4"), "init_lora_weights"),
    "init olora": (config(init_lora_weights="olora"), "init_lora_weights"),
    "init corda": (config(init_lora_weights="corda"), "init_lora_weights"),
    "init loftq": (config(init_lora_weights="loftq"), "init_lora_weights"),
    "init a number": (config(init_lora_weights=[1]), "init_lora_weights"),
    "an option of tomorrow": (config(use_quantum_lora=True), "use_quantum_lora"),
    "an option with a name of no text": (config(**{"\ud800": True}), "ud800"),
    "an option with a long name": (config(**{"x" * 100_000: True}), "xxx"),
    "a number of tomorrow": (config(warp_factor=0.5), "warp_factor"),
    "dora and lora_bias": (config(use_dora=True, lora_bias=True), "lora_bias"),
    "dora and activated": (config(use_dora=True, alora_invocation_tokens=[1]), "alora_invocation_tokens"),
    "embedding and activated": (
        tensors({"alora_invocation_tokens": [1], **EMBED}, **EMBED_TENSORS),
        "alora_invocation_tokens",
    ),
    "embedding and lora_bias": (
        tensors(
            {"lora_bias": True, **EMBED},
            **EMBED_TENSORS,
            bias=torch.ones(HIDDEN),
            **{key(DOWN, "lora_B.bias"): torch.ones(HIDDEN)},
        ),
        "lora_bias",
    ),
    # the header
    "file empty": (data(b""), "8"),
    "file of 7 bytes": (data(b"1234567"), "8"),
    "header length 0": (header_text(b"", 0), "malformed"),
    "header length 2**63": (header_text(b"{}", 1 << 63), "header"),
    "header longer than the file": (header_text(b"{}", 3), "header"),
    "header over a megabyte": (header_text(b" " * ((1 << 20) + 1)), "header"),
    "header no JSON": (header_text(b"{]"), "malformed"),
    "header no UTF-8": (header_text(b'{"\xff": 1}'), "malformed"),
    "header in UTF-16": (header_text('{"a": 1}'.encode("utf-16")), "malformed"),
    "header a list": (header_text(b"[1]"), "JSON object"),
    "header nested deeply": (header_text(DEEP), "nested"),
    "header with a key twice": (header_text(b'{"a": 1, "a": 1}'), "twice"),
    "header with 5,000 tensors": (header_text(json.dumps({str(i): 1 for i in range(5000)}).encode()), "tensors"),
    "header without tensors": (header_text(b"{}"), "no tensors"),
    "header with a number for a tensor": (header_text(b'{"a": 1}'), "dtype"),
    "header with another field": (entry(stride=[1]), "dtype"),
    "a name of 10,000 characters": (data(file_of({"x" * 10_000: torch.ones(1)})), "characters"),
    "type I8": (tensors(A=GOOD[A].to(torch.int8)), "I8"),
    "type unknown": (entry(dtype="F4"), "F4"),
    "type a list": (entry(dtype=["F32"]), "F32"),
    "shape with 0": (entry(shape=[0, HIDDEN]), "shape"),
    "shape negative": (entry(shape=[-2, -HIDDEN]), "shape"),
    "shape of floats": (entry(shape=[2.0, 6.0]), "shape"),
    "shape of trues": (entry(shape=[True, 12]), "shape"),
    "shape whose product overflows": (entry(shape=[BIG, BIG]), "shape"),
    "shape large": (entry(shape=[1 << 30, 1 << 30]), "bytes"),
    "shape of three": (entry(shape=[1, 2, HIDDEN]), "shape"),
    "shape empty": (entry(shape=[]), "shape"),
    "shape a text": (entry(shape="2,6"), "shape"),
    "offsets reversed": (entry(data_offsets=[48, 0]), "bytes"),
    "offsets negative": (entry(data_offsets=[-48, 0]), "data_offsets"),
    "offsets past the end": (entry(data_offsets=[BIG, BIG + 48]), "gap"),
    "offsets that overlap": (entry(data_offsets=[8, 56]), "gap|overlaps"),
    "offsets of three": (entry(data_offsets=[0, 24, 48]), "data_offsets"),
    "offsets of the wrong length": (entry(data_offsets=[0, 44]), "bytes"),
    "bytes left over": (data(file_of(GOOD) + b"x"), "describes"),
    "file cut short": (data(file_of(GOOD)[:-1]), "describes"),
    "values NaN": (tensors(A=torch.full((2, HIDDEN), torch.nan)), "finite"),
    "values infinite": (tensors(B=torch.full((HIDDEN, 2), -torch.inf)), "finite"),
    "file too large": (data(file_of(GOOD) + bytes(2 << 20)), "bytes"),
    # the tensors
    "no B": (tensors(B=None), "lora_B"),
    "no A": (tensors(A=None), "lora_A"),
    "A transposed": (tensors(A=GOOD[A].T), "shape"),
    "B transposed": (tensors(B=GOOD[B].T), "shape"),
    "A and B of other ranks": (tensors(B=torch.ones(HIDDEN, 3)), "shape"),
    "A of another base": (tensors(A=torch.ones(2, HIDDEN + 1)), "shape"),
    "B of another base": (tensors(B=torch.ones(HIDDEN + 1, 2)), "shape"),
    "A flat": (tensors(A=torch.ones(2 * HIDDEN)), "shape"),
    "a layer the base lacks": (tensors(**{A.replace("layers.0", "layers.7"): GOOD[A]}), "layers.7"),
    "a module the base lacks": (tensors(**{A.replace("q_proj", "qq_proj"): GOOD[A]}), "qq_proj"),
    "a tensor without prefix": (tensors(**{"lora_A.weight": GOOD[A]}), "PEFT"),
    "a tensor of another name": (tensors(**{A.replace("lora_A", "lora_C"): GOOD[A]}), "lora_C"),
    "a tensor with an adapter's name": (tensors(**{A.replace("lora_A", "lora_A.default"): GOOD[A]}), "default"),
    "a full matrix": (tensors(**{key(Q, "weight"): torch.ones(HIDDEN, HIDDEN)}), "q_proj.weight"),
    "a base weight of another model": (
        tensors(**{key(K, "base_layer.weight"): torch.ones(OUT, HIDDEN)}),
        "not this base",
    ),
    "a base weight of another size": (
        tensors(**{key(EMBEDDING, "base_layer.weight"): torch.ones(12, HIDDEN)}),
        "embed",
    ),
    "only a base weight": (
        data(file_of({key(Q, "base_layer.weight"): base_weight(Q)})),
        "no module",
    ),
    "a bias without lora_bias": (tensors(bias=torch.ones(HIDDEN)), "lora_B.bias"),
    "lora_bias without a bias": (config(lora_bias=True), "lora_B.bias"),
    "a magnitude without use_dora": (tensors(magnitude=torch.ones(HIDDEN)), "lora_magnitude_vector"),
    "use_dora without a magnitude": (config(use_dora=True), "lora_magnitude_vector"),
    "a magnitude in two spellings": (
        tensors(
            {"use_dora": True},
            magnitude=torch.ones(HIDDEN),
            **{key(Q, "lora_magnitude_vector.weight"): torch.ones(HIDDEN)},
        ),
        "twice",
    ),
    "a magnitude of another size": (
        tensors(
            {"use_dora": True},
            magnitude=torch.ones(HIDDEN + 1),
            **{key(DOWN, "lora_magnitude_vector"): torch.ones(HIDDEN)},
        ),
        "magnitude",
    ),
    "linear tensors for the embedding": (
        tensors(
            EMBED,
            **{
                key(EMBEDDING, "lora_A.weight"): torch.ones(2, VOCAB),
                key(EMBEDDING, "lora_B.weight"): torch.ones(6, 2),
            },
        ),
        "lora_embedding_A",
    ),
    "a larger vocabulary": (tensors(EMBED, embed_A=torch.ones(2, VOCAB + 1), embed_B=torch.ones(HIDDEN, 2)), "shape"),
    "embedding tensors for a linear": (tensors(**{key(Q, "lora_embedding_A"): GOOD[A]}), "lora_embedding_A"),
}
