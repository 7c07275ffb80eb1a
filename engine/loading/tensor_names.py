"""Names and shapes of a model's tensors, in Hugging Face checkpoints and GGUF files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ..checkpoint.mixtures.mixture import Mixture
from ..checkpoint.model_config import ModelConfig
from ..errors import ModelError, shortened

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
SINKS = "sinks"
CORRECTION = "e_score_correction_bias"  # of a router

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
        if config.attention_sinks:
            shapes[f"{prefix}.self_attn.{SINKS}"] = (config.num_heads,)
        shapes |= _linears(f"{prefix}.self_attn", qkv_modules(config), hidden, config.qkv_bias)
        shapes |= _linears(f"{prefix}.self_attn", {"o_proj": hidden}, config.query_size, config.output_bias)
        if (mixture := config.layers[index].mixture) is not None:
            shapes |= mixture_shapes(f"{prefix}.{mixture.names.block}", mixture, hidden)
            continue
        shapes |= _linears(f"{prefix}.mlp", gate_up_modules(config), hidden, config.mlp_bias)
        shapes |= _linears(f"{prefix}.mlp", {"down_proj": hidden}, config.intermediate_size, config.mlp_bias)
    return shapes


def mixture_shapes(prefix: str, mixture: Mixture, hidden: int) -> dict[str, Shape]:
    """Return the names and shapes of the tensors of one layer's mixture of experts."""
    names, count, size = mixture.names, mixture.num_experts, mixture.size
    shapes = _linears(prefix, {names.router: count}, hidden, mixture.biased)
    if mixture.corrected:
        shapes[f"{prefix}.{names.router}.{CORRECTION}"] = (count,)
    match names.storage:
        case "modules":
            for expert in range(count):
                inner = f"{prefix}.experts.{expert}"
                shapes |= _linears(inner, {names.gate: size, names.up: size}, hidden, bias=False)
                shapes |= _linears(inner, {names.down: hidden}, size, bias=False)
        case "stacked":
            shapes[f"{prefix}.{names.gate}.weight"] = (count, 2 * size, hidden)
            shapes[f"{prefix}.{names.down}.weight"] = (count, hidden, size)
        case "interleaved":
            shapes[f"{prefix}.{names.gate}"] = (count, hidden, 2 * size)
            shapes[f"{prefix}.{names.gate}_bias"] = (count, 2 * size)
            shapes[f"{prefix}.{names.down}"] = (count, size, hidden)
            shapes[f"{prefix}.{names.down}_bias"] = (count, hidden)
    if mixture.shared_size:
        inner = f"{prefix}.{names.shared}"
        shapes |= _linears(inner, shared_modules(mixture), hidden, bias=False)
        shapes |= _linears(inner, {"down_proj": hidden}, mixture.shared_size, bias=False)
    if mixture.gated_sharing:
        shapes[f"{prefix}.{names.shared}_gate.weight"] = (1, hidden)
    return shapes


def expert_modules(prefix: str, mixture: Mixture, expert: int) -> tuple[str, str, str]:
    """Return the names of an expert's gate, up and down, also where a checkpoint stores those of all as one tensor."""
    names = mixture.names
    stored = (names.gate, names.up, names.down)
    gate, up, down = stored if names.storage == "modules" else ("gate_proj", "up_proj", "down_proj")
    inner = f"{prefix}.experts.{expert}"
    return f"{inner}.{gate}", f"{inner}.{up}", f"{inner}.{down}"


def shared_modules(mixture: Mixture) -> dict[str, int]:
    """Return the modules of the shared expert's gate and up, in this order, and the rows of each."""
    return {"gate_proj": mixture.shared_size, "up_proj": mixture.shared_size}


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
_GGUF_EXPERTS = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def from_gguf(name: str, config: ModelConfig) -> str:
    """Return the Hugging Face name of a tensor in a GGUF file; a name without counterpart stays as it is."""
    if match := _GGUF_LAYER.fullmatch(name):
        index, module, kind = match.groups()
        if found := _gguf_mixture_module(module, config, int(index)) or _gguf_layer_module(module, config):
            return f"model.layers.{index}.{found}.{kind}"
        return name
    module, _, kind = name.rpartition(".")
    return f"{_GGUF_MODULES[module]}.{kind}" if module in _GGUF_MODULES else name


def experts_from_gguf(name: str, config: ModelConfig) -> list[str]:
    """Return the Hugging Face names of the matrices that a GGUF tensor of experts stacks; none for another tensor."""
    match = _GGUF_LAYER.fullmatch(name)
    if match is None or match[2] not in _GGUF_EXPERTS or int(match[1]) >= config.num_layers:
        return []
    mixture = config.layers[int(match[1])].mixture
    if mixture is None or match[3] != "weight":
        return []
    names = mixture.names
    module = {"gate": names.gate, "up": names.up, "down": names.down}[_GGUF_EXPERTS[match[2]]]
    prefix = f"model.layers.{match[1]}.{names.block}.experts"
    return [f"{prefix}.{expert}.{module}.weight" for expert in range(mixture.num_experts)]


def _gguf_mixture_module(module: str, config: ModelConfig, index: int) -> str | None:
    """The module of a mixture that all tokens pass, by its name in GGUF files."""
    mixture = config.layers[index].mixture if index < config.num_layers else None
    if mixture is None:
        return None
    names = mixture.names
    found = {
        "ffn_gate_inp": names.router,
        "ffn_gate_inp_shexp": f"{names.shared}_gate",
        "ffn_gate_shexp": f"{names.shared}.gate_proj",
        "ffn_up_shexp": f"{names.shared}.up_proj",
        "ffn_down_shexp": f"{names.shared}.down_proj",
    }.get(module)
    return None if found is None else f"{names.block}.{found}"


def _gguf_layer_module(module: str, config: ModelConfig) -> str | None:
    if config.post_norms and module in _GGUF_POST_NORMS:
        return _GGUF_POST_NORMS[module]
    if config.fused_weights and module == "ffn_up":
        return "mlp.gate_up_proj"
    return _GGUF_LAYER_MODULES.get(module)
