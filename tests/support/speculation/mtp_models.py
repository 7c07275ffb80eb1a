"""Tiny random checkpoints with an MTP module, adapters of them, and the module in plain torch."""

from __future__ import annotations

import copy
import functools
import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    from peft import LoraConfig, PeftModel, get_peft_model

LAYERS, HIDDEN, VOCAB, EPS = 2, 64, 101, 1e-5
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "tie_word_embeddings": False,
}
BASES: dict[str, tuple[type[Any], type[Any], dict[str, Any], list[str]]] = {
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
        ["q_proj", "k_proj", "v_proj", "o_proj"],
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 40,
            "kv_lora_rank": 48,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
        ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"],
    ),
}
MODULE = f"model.layers.{LAYERS}"


@functools.cache
def deeper(name: str, vocab: int = VOCAB) -> PreTrainedModel:
    """A random model with one layer more, which becomes that of the module."""
    config_class, model_class, changes, _ = BASES[name]
    fields = COMMON | changes | {"vocab_size": vocab}
    config = config_class(**fields, attn_implementation="eager", experts_implementation="eager")
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.2, generator=generator)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
    return model


def save_mtp(name: str, folder: Path, *, shared: bool, vocab: int = VOCAB) -> Path:
    """Write a checkpoint with an MTP module, as published ones name its tensors.

    Args:
        shared: without an embedding and a head of the module's own.
    """
    deeper(name, vocab).save_pretrained(folder)
    generator = torch.Generator().manual_seed(7)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator) / math.sqrt(sizes[-1])

    tensors = load_file(folder / "model.safetensors")
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{MODULE}.{norm}.weight"] = 1 + 2 * random(HIDDEN)
    tensors[f"{MODULE}.eh_proj.weight"] = 2 * random(HIDDEN, 2 * HIDDEN)
    if not shared:
        tensors[f"{MODULE}.embed_tokens.weight"] = 2 * random(vocab, HIDDEN)
        tensors[f"{MODULE}.shared_head.head.weight"] = random(vocab, HIDDEN)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def shallow(name: str, vocab: int = VOCAB) -> PreTrainedModel:
    """The model without the layer of its module."""
    model = copy.deepcopy(deeper(name, vocab))
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    return model


def save_mtp_adapter(name: str, folder: Path, vocab: int = VOCAB) -> Path:
    """Write a random adapter of the model without its module."""
    torch.manual_seed(3)
    options = {"r": 6, "lora_alpha": 9, "target_modules": BASES[name][3], "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(shallow(name, vocab), LoraConfig(task_type="CAUSAL_LM", **options)).save_pretrained(folder)
    return folder


class PlainModule:
    """A module in plain torch, its layer from transformers: whole sequences, no cache, one token after another."""

    def __init__(self, name: str, folder: Path, adapter: Path | None) -> None:
        self.target: Any = shallow(name)
        self.decoder: Any = deeper(name).model
        tensors = load_file(folder / "model.safetensors")
        self.weights = {key.removeprefix(f"{MODULE}."): value for key, value in tensors.items() if MODULE in key}
        self.embedding = self.weights.get("embed_tokens.weight", tensors["model.embed_tokens.weight"])
        self.head = self.weights.get("shared_head.head.weight", tensors["lm_head.weight"])
        if adapter is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.target = PeftModel.from_pretrained(self.target, adapter).eval()

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Greedy drafts behind known tokens, of which the target has read all but the last."""
        base = self.target.get_base_model() if isinstance(self.target, PeftModel) else self.target
        given = base.model(input_ids=torch.tensor([tokens[:-1]])).last_hidden_state[0]  # behind the last norm
        read, drafts = list(tokens[1:]), []
        for _ in range(count):
            out = self._layer(torch.tensor(read), given)
            drafts.append(int((self._norm("shared_head.norm", out[-1]) @ self.head.T).argmax()))
            read.append(drafts[-1])
            given = torch.cat((given, out[-1:]))
        return drafts

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weights[f"{name}.weight"]

    def _layer(self, tokens: Tensor, given: Tensor) -> Tensor:
        beside = torch.cat((self._norm("enorm", self.embedding[tokens]), self._norm("hnorm", given)), dim=-1)
        x = functional.linear(beside, self.weights["eh_proj.weight"])[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), torch.finfo(torch.float32).min).triu(1)[None, None]
        rotary = self.decoder.rotary_emb(x, positions)
        found = self.decoder.layers[LAYERS](x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return found[0]
