"""Names and shapes of a model's tensors, in Hugging Face checkpoints and GGUF files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ..checkpoint.families.mixture import Mixture
from ..checkpoint.families.norm_layout import HeadNorm
from ..checkpoint.model_config import ModelConfig
from ..errors import ModelError, shortened

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm"
HEAD = "lm_head.weight"
SINKS = "sinks"
CORRECTION = "e_score_correction_bias"  # of a router

# Old checkpoints store the rotary frequencies, which follow from the config.
_COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def qkv_modules(config: ModelConfig) -> dict[str, int]:
    """Return the modules of q, k and v, in this order, and the rows of each."""
    q, kv = config.query_size, config.kv_size
    sizes = (q, kv, kv) if len(config.qkv_modules) > 1 else (q + 2 * kv,)
    return dict(zip(config.qkv_modules, sizes, strict=True))


def up_modules(config: ModelConfig) -> dict[str, int]:
    """Return the modules of the MLP's gate and up, in this order, or of up alone, and the rows of each."""
    names = config.mlp_modules[:-1]
    rows = config.intermediate_size * (2 if config.gated_mlp else 1)
    return dict.fromkeys(names, rows // len(names))


def down_module(config: ModelConfig) -> dict[str, int]:
    """Return the module of the MLP's down and its rows."""
    return {config.mlp_modules[-1]: config.hidden_size}


def head_norm_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the names of the norms of query and key heads, if there are any, and their shapes."""
    if config.qk_norm is None:
        return {}
    heads = (config.num_heads, config.num_kv_heads)
    shapes: dict[HeadNorm, tuple[Shape, ...]] = {
        "head": ((config.head_dim,),) * 2,
        "projection": tuple((count * config.head_dim,) for count in heads),
        "centred": tuple((count, config.head_dim) for count in heads),
    }
    return dict(zip(config.head_norms, shapes[config.qk_norm], strict=True))


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the names and shapes of all tensors that a checkpoint of this model must have."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden), **_norm(FINAL_NORM, config)}
    if not config.tied_head:
        shapes[HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        for name in filter(None, config.norms):
            shapes |= _norm(f"{prefix}.{name}", config)
        shapes |= {f"{prefix}.self_attn.{name}.weight": shape for name, shape in head_norm_shapes(config).items()}
        if config.attention_sinks:
            shapes[f"{prefix}.self_attn.{SINKS}"] = (config.num_heads,)
        shapes |= _linears(f"{prefix}.self_attn", qkv_modules(config), hidden, config.qkv_bias)
        shapes |= _linears(f"{prefix}.self_attn", {"o_proj": hidden}, config.query_size, config.output_bias)
        if (mixture := config.layers[index].mixture) is not None:
            shapes |= mixture_shapes(f"{prefix}.{mixture.names.block}", mixture, hidden)
            continue
        shapes |= _linears(f"{prefix}.mlp", up_modules(config), hidden, config.mlp_bias)
        shapes |= _linears(f"{prefix}.mlp", down_module(config), config.intermediate_size, config.mlp_bias)
    return shapes


def norm_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the names of all norms, those of query and key heads included, and the shapes of their weights."""
    layers = range(config.num_layers)
    of_layers = [f"model.layers.{index}.{name}" for index in layers for name in filter(None, config.norms)]
    shapes: dict[str, Shape] = dict.fromkeys([FINAL_NORM, *of_layers], (config.hidden_size,))
    for index in layers:
        heads = head_norm_shapes(config)
        shapes |= {f"model.layers.{index}.self_attn.{name}": shape for name, shape in heads.items()}
    return shapes


def _norm(name: str, config: ModelConfig) -> dict[str, Shape]:
    kinds = ("weight", "bias") if config.norm_bias else ("weight",)
    return {f"{name}.{kind}": (config.hidden_size,) for kind in kinds}


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


def prediction_tensors(names: Iterable[str], config: ModelConfig) -> frozenset[str]:
    """Return the tensors of layers that predict further tokens, which are not loaded."""
    first = config.num_layers
    prefixes = tuple(f"model.layers.{index}." for index in range(first, first + config.prediction_layers))
    return frozenset(name for name in names if name.startswith(prefixes))


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
    norms, attention, mlp = config.norms, config.qkv_modules, config.mlp_modules
    if module in _GGUF_NORMS:
        # Where the output of attention has no norm, Seed-OSS's files call that in front of the MLP so.
        first, second = _GGUF_NORMS[module]
        return norms[first] or norms[second]
    names = {
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": f"self_attn.{config.head_norms[0]}",
        "attn_k_norm": f"self_attn.{config.head_norms[1]}",
        "ffn_up": f"mlp.{mlp[-2]}",
        "ffn_down": f"mlp.{mlp[-1]}",
    }
    if len(mlp) == 3:
        names["ffn_gate"] = f"mlp.{mlp[0]}"
    of_qkv = ("attn_q", "attn_k", "attn_v") if len(attention) == 3 else ("attn_qkv",)
    names |= {stored: f"self_attn.{name}" for stored, name in zip(of_qkv, attention, strict=True)}
    return names.get(module)


# The index in ``LayerNorms``, and of the norm that is meant where that is None.
_GGUF_NORMS = {"attn_norm": (0, 0), "post_attention_norm": (1, 2), "ffn_norm": (2, 2), "post_ffw_norm": (3, 3)}
