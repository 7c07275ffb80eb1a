"""Tiny bases from transformers, adapters on them from peft, and both as the engine sees them."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.lora.base_projections import EMBEDDING, BaseLayout, ProjectionShape

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    from peft import LoraConfig, PeftModel, get_peft_model

VOCAB = 101
CPU = torch.device("cpu")
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
Kind = tuple[type[Any], type[Any], dict[str, Any]]
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
BASES: dict[str, Kind] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama_biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 7}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, _TIED),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, _TIED | {"no_rope_layer_interval": 2}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, _TIED | {"sliding_window": 5, "query_pre_attn_scalar": 10}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, _TIED | {"sliding_window": 6}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
}
"""A base of every family that the engine loads, and more."""

# Their heads are of a size that native attention takes, so that bits do not depend on the batch, and so do GPU kernels.
NATIVE_BASES: dict[str, Kind] = {
    f"native_{name}": (config, model, {**options, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16})
    for name, (config, model, options) in BASES.items()
    if name in ("llama", "qwen2", "qwen3", "gemma3")
}
_ALL: dict[str, Kind] = {
    **BASES,
    **NATIVE_BASES,
    "worded": (LlamaConfig, LlamaForCausalLM, {"vocab_size": 440}),  # for the tests' tokenizer
    "wordy": (LlamaConfig, LlamaForCausalLM, {"vocab_size": 440, "max_position_embeddings": 4096}),
}


@functools.cache
def base(name: str, folder: Path) -> PreTrainedModel:
    """A random base, saved to ``folder / name``."""
    config_class, model_class, options = _ALL[name]
    torch.manual_seed(sum(map(ord, name)))
    fields = {key: value for key, value in _COMMON.items() if not (name == "phi3" and key == "head_dim")}
    model = model_class(config_class(**fields | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / name)
    return model


@functools.cache
def decoder(name: str, folder: Path) -> DecoderModel:
    """The same base in the engine."""
    base(name, folder)
    return load_model(folder / name, dtype=torch.float32, device=CPU)


def layout_of(model: DecoderModel, hf: PreTrainedModel, dtype: torch.dtype = torch.float32) -> BaseLayout:
    """The base as adapters see it; its weights come from transformers' copy."""
    config = model.config
    projections = [ProjectionShape((EMBEDDING,), (config.hidden_size,), config.vocab_size)]
    for layer in model.layers:
        for part in (layer.attention.qkv, layer.attention.output, *layer.mlp.projections):
            projections.append(ProjectionShape(part.modules, part.sizes, part.packed.in_features))
    projections.append(ProjectionShape(model.head.modules, model.head.sizes, model.head.packed.in_features))
    norms = {name: tuple(module.weight.shape) for name, module in hf.named_modules() if "Norm" in type(module).__name__}
    tied = bool(hf.config.tie_word_embeddings)
    return BaseLayout(tuple(projections), dtype, CPU, weight_of(hf), bias_of(hf), norms=norms, tied=tied)


def weight_of(hf: PreTrainedModel) -> Callable[[str], Tensor]:
    return lambda module: hf.get_submodule(module).weight.detach()


def bias_of(hf: PreTrainedModel) -> Callable[[str], Tensor | None]:
    def read(module: str) -> Tensor | None:
        bias = getattr(hf.get_submodule(module), "bias", None)
        return None if bias is None else bias.detach()

    return read


REPLACED = ("modules_to_save.", "trainable_tokens_delta")
"""Parts of the names of parameters that take the place of the base's."""


def copy_of(name: str, folder: Path) -> PreTrainedModel:
    """A base of its own, for peft to change."""
    return copy.deepcopy(base(name, folder))


def perturb(model: Any) -> None:
    """Add noise to all that an adapter trains."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_magnitude" in key:
                parameter.mul_(0.5 + torch.rand_like(parameter))
            elif "lora_embedding" in key:
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif "lora_" in key or any(part in key for part in REPLACED) or key.endswith(".bias"):
                parameter.add_((0.1 if parameter.requires_grad else 0.0) * torch.randn_like(parameter))


def make_adapter(name: str, folder: Path, out: Path, seed: int = 0, **options: Any) -> Path:
    """Let peft make and save a random adapter whose every tensor matters."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fields = {"task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": ["q_proj"], **options}
        model = get_peft_model(copy_of(name, folder), LoraConfig(**fields))
        perturb(model)
        model.save_pretrained(out)
    return out


class PeftOracle:
    """Logits of a base with adapters from their folders, as peft computes them."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder

    @torch.no_grad()
    def logits(self, adapter: Path | None, tokens: list[int]) -> Tensor:
        """[T, V]."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: Any = copy_of(self._name, self._folder)
            if adapter is not None:
                model = PeftModel.from_pretrained(model, adapter).eval()
            return model(input_ids=torch.tensor([tokens])).logits[0].float()


def greedy_by_peft(name: str, folder: Path) -> Callable[..., list[int]]:
    """Greedy continuations as peft computes them, from the whole text at each token: an oracle.

    Returns:
        A function of an adapter's name in ``folder`` or None, a prompt, how many tokens, and which are allowed.
    """
    models: dict[str | None, Any] = {}

    @torch.no_grad()
    def generate(adapter: str | None, prompt: list[int], count: int, allowed: list[int] | None = None) -> list[int]:
        if adapter not in models:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model: Any = copy_of(name, folder)
                models[adapter] = PeftModel.from_pretrained(model, folder / adapter).eval() if adapter else model
        tokens = list(prompt)
        for _ in range(count):
            logits = models[adapter](input_ids=torch.tensor([tokens])).logits[0, -1]
            mask = torch.full_like(logits, -torch.inf)
            mask[allowed or list(range(VOCAB))] = 0
            best = (logits + mask).topk(2).values
            assert best[0] - best[1] > 1e-4, "the oracle itself is undecided"
            tokens.append(int((logits + mask).argmax()))
        return tokens[len(prompt) :]

    return generate
