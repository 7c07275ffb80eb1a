"""Names and shapes of a model's tensors, in Hugging Face checkpoints and GGUF files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ..checkpoint.model_config import ModelConfig
from ..errors import ModelError, shortened

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

# Old checkpoints store the rotary frequencies, which follow from the config.
_COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def qkv_modules(config: ModelConfig) -> dict[str, int]:
    """Return the modules of q, k and v, in this order, and the rows of each."""
    q, kv = config.query_size, config.kv_size
    return {"qkv_proj": q + 2 * kv} if config.fused_weights else {"q_proj": q, "k_proj": kv, "v_proj": kv}


def gate_up_modules(config: ModelConfig) -> dict[str, int]:
    """Return the modules of the MLP's gate and up, in this order, and the rows of each."""
    size = config.intermediate_size
    return {"gate_up_proj": 2 * size} if config.fused_weights else {"gate_proj": size, "up_proj": size}


def layer_norms(config: ModelConfig) -> tuple[str, ...]:
    """Return the norms of a layer: before attention, (after attention,) before the MLP(, after the MLP)."""
    if not config.post_norms:
        return ("input_layernorm", "post_attention_layernorm")
    return ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the names and shapes of all tensors that a checkpoint of this model must have."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tied_head:
        shapes[HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in layer_norms(config)}
        if config.qk_norm:
            shapes |= {f"{prefix}.self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
        shapes |= _linears(f"{prefix}.self_attn", qkv_modules(config), hidden, config.qkv_bias)
        shapes |= _linears(f"{prefix}.self_attn", {"o_proj": hidden}, config.query_size, config.output_bias)
        shapes |= _linears(f"{prefix}.mlp", gate_up_modules(config), hidden, config.mlp_bias)
        shapes |= _linears(f"{prefix}.mlp", {"down_proj": hidden}, config.intermediate_size, config.mlp_bias)
    return shapes


def _linears(prefix: str, modules: dict[str, int], in_features: int, bias: bool) -> dict[str, Shape]:
    weights: dict[str, Shape] = {f"{prefix}.{name}.weight": (rows, in_features) for name, rows in modules.items()}
    biases: dict[str, Shape] = {f"{prefix}.{name}.bias": (rows,) for name, rows in modules.items()}
    return weights | biases if bias else weights


def check_tensors(expected: Mapping[str, Shape], found: Mapping[str, Shape], optional: frozenset[str]) -> None:
    """Raise ``ModelError`` naming tensors that are missing, unexpected or of another shape than expected.

    Args:
        optional: further tensors that a checkpoint may have.
    """
    if missing := expected.keys() - found.keys():
        raise ModelError(f"The checkpoint lacks {_listed(missing)}.")
    extra = {name for name in found.keys() - expected.keys() - optional if not _COMPUTED.fullmatch(name)}
    if extra:
        raise ModelError(f"The checkpoint has tensors that this architecture does not use: {_listed(extra)}.")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(f"The tensor {name} has shape {found[name]}, but the config makes it {shape}.")


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(map(shortened, ordered[:5]))
    return shown if len(ordered) <= 5 else f"{shown} and {len(ordered) - 5} more"


_GGUF_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def from_gguf(name: str, config: ModelConfig) -> str:
    """Return the Hugging Face name of a tensor in a GGUF file; a name without counterpart stays as it is."""
    if match := _GGUF_LAYER.fullmatch(name):
        index, module, kind = match.groups()
        if found := _gguf_layer_module(module, config):
            return f"model.layers.{index}.{found}.{kind}"
        return name
    module, _, kind = name.rpartition(".")
    return f"{_GGUF_MODULES[module]}.{kind}" if module in _GGUF_MODULES else name


def _gguf_layer_module(module: str, config: ModelConfig) -> str | None:
    if config.post_norms and module in _GGUF_POST_NORMS:
        return _GGUF_POST_NORMS[module]
    if config.fused_weights and module == "ffn_up":
        return "mlp.gate_up_proj"
    return _GGUF_LAYER_MODULES.get(module)
