"""Tiny random checkpoints with an MTP module, adapters of them, and the module in plain torch."""

from __future__ import annotations

import copy
import functools
import json
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SarvamMoEConfig,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    from peft import LoraConfig, PeftModel, get_peft_model

LAYERS, HIDDEN, VOCAB, EPS = 2, 64, 101, 1e-5
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}


class Base(NamedTuple):
    """A family, and how its checkpoints name a module.

    Attributes:
        linears: modules that its adapter changes.
        architecture: where transformers has the class under another name.
        module: what names of the module's tensors begin with.
        names: of the norms of embeddings and of hidden states, of the product, and of the last norm.
        hidden_first: the product's input begins with the hidden states.
        reads_normed: these are behind the model's last norm.
        leaves_normed: its own are behind its last norm where it reads them.
        layer: what names of the tensors of its layer begin with, if that is something else.
        offset: added to the weights of norms.
    """

    config: type[Any]
    model: type[Any]
    fields: dict[str, Any]
    linears: list[str]
    architecture: str | None = None
    module: str = f"model.layers.{LAYERS}"
    names: tuple[str, str, str, str] = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    hidden_first: bool = False
    reads_normed: bool = True
    leaves_normed: bool = False
    layer: str | None = None
    offset: float = 0.0


_DELTA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_OF_QWEN: dict[str, Any] = {
    "linears": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "module": "mtp",
    "names": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "leaves_normed": True,
    "layer": "mtp.layers.0",
    "offset": 1.0,
}
BASES: dict[str, Base] = {
    "glm4_moe": Base(
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {**_EXPERTS, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
        ["q_proj", "k_proj", "v_proj", "o_proj"],
    ),
    "deepseek_v3": Base(
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {
            **_EXPERTS,
            "num_key_value_heads": 4,
            "q_lora_rank": 40,
            "kv_lora_rank": 48,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
        ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"],
    ),
    "mimo": Base(
        Qwen2Config,
        Qwen2ForCausalLM,
        {"num_key_value_heads": 2},
        ["q_proj", "v_proj", "up_proj", "down_proj"],
        "MiMoForCausalLM",
        "model.mtp_layers.0",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        hidden_first=True,
        reads_normed=False,
    ),
    "bailing_moe_v2": Base(
        SarvamMoEConfig,
        Glm4MoeForCausalLM,
        {**_EXPERTS, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
        ["o_proj"],
        "BailingMoeV2ForCausalLM",
        names=("enorm", "hnorm", "eh_proj", "final_layernorm"),
        leaves_normed=True,
    ),
    "qwen3_next": Base(
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {
            **_DELTA,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        **_OF_QWEN,
    ),
    "qwen3_5": Base(Qwen3_5TextConfig, Qwen3_5ForCausalLM, _DELTA, **_OF_QWEN),
}


@functools.cache
def deeper(name: str, vocab: int = VOCAB) -> PreTrainedModel:
    """A random model with one layer more, which becomes that of the module."""
    base = BASES[name]
    fields = COMMON | base.fields | {"vocab_size": vocab}
    config = base.config(**fields, attn_implementation="eager", experts_implementation="eager")
    model = base.model(config).eval()
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

    base = BASES[name]
    found = load_file(folder / "model.safetensors")
    tensors = {
        key.replace(f"model.layers.{LAYERS}.", f"{base.layer or base.module}."): tensor for key, tensor in found.items()
    }
    *norms, product, last = base.names
    for norm in (*norms, last):
        tensors[f"{base.module}.{norm}.weight"] = 1 - base.offset + 2 * random(HIDDEN)
    tensors[f"{base.module}.{product}.weight"] = 2 * random(HIDDEN, 2 * HIDDEN)
    if not shared:
        tensors[f"{base.module}.embed_tokens.weight"] = 2 * random(vocab, HIDDEN)
        tensors[f"{base.module}.shared_head.head.weight"] = random(vocab, HIDDEN)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    if base.architecture is not None:
        fields |= {"architectures": [base.architecture], "attention_bias": True}
        fields.pop("layer_types", None)
    if base.layer is not None:
        fields["layer_types"] = fields["layer_types"][:LAYERS]
        del fields["num_nextn_predict_layers"]
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
    options = {"r": 6, "lora_alpha": 9, "target_modules": BASES[name].linears, "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(shallow(name, vocab), LoraConfig(task_type="CAUSAL_LM", **options)).save_pretrained(folder)
    return folder


class PlainModule:
    """A module in plain torch, its layer from transformers: whole sequences, no cache, one token after another."""

    def __init__(self, name: str, folder: Path, adapter: Path | None) -> None:
        self.target: Any = shallow(name)
        self.decoder: Any = deeper(name).model
        self.base = BASES[name]
        tensors, prefix = load_file(folder / "model.safetensors"), f"{self.base.module}."
        self.weights = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        # Transformers writes Ling's own name.
        embedding = tensors.get("model.embed_tokens.weight", tensors.get("model.word_embeddings.weight"))
        self.embedding = self.weights.get("embed_tokens.weight", embedding)
        self.head = self.weights.get("shared_head.head.weight", tensors["lm_head.weight"])
        if adapter is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.target = PeftModel.from_pretrained(self.target, adapter).eval()

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Greedy drafts behind known tokens, of which the target has read all but the last."""
        given = self._hidden(tokens[:-1])
        read, drafts = list(tokens[1:]), []
        for _ in range(count):
            out = self._layer(torch.tensor(read), given)
            drafts.append(int((self._norm(self.base.names[3], out[-1]) @ self.head.T).argmax()))
            read.append(drafts[-1])
            left = self._norm(self.base.names[3], out[-1:]) if self.base.leaves_normed else out[-1:]
            given = torch.cat((given, left))
        return drafts

    def _hidden(self, tokens: list[int]) -> Tensor:
        """Hidden states of the target behind its last layer, [T, H]."""
        model = (self.target.get_base_model() if isinstance(self.target, PeftModel) else self.target).model
        seen: list[Tensor] = []
        hook = model.norm.register_forward_hook(lambda _, args, out: seen.extend((args[0], out)))
        model(input_ids=torch.tensor([tokens]))
        hook.remove()
        return seen[self.base.reads_normed][0]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (self.base.offset + self.weights[f"{name}.weight"])
        )

    def _layer(self, tokens: Tensor, given: Tensor) -> Tensor:
        token_norm, hidden_norm, product, _ = self.base.names
        parts = [self._norm(token_norm, self.embedding[tokens]), self._norm(hidden_norm, given)]
        beside = torch.cat(parts[::-1] if self.base.hidden_first else parts, dim=-1)
        x = functional.linear(beside, self.weights[f"{product}.weight"])[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), torch.finfo(torch.float32).min).triu(1)[None, None]
        rotary = self.decoder.rotary_emb(x, positions)
        found = self.decoder.layers[LAYERS](x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return found[0]
