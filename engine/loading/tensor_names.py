"""Names and shapes of a model's tensors, in Hugging Face checkpoints and GGUF files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ..checkpoint.families.norm_layout import HeadNorm
from ..checkpoint.model_config import ModelConfig
from ..errors import ModelError, shortened

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm"
HEAD = "lm_head.weight"

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
        shapes |= _linears(f"{prefix}.self_attn", qkv_modules(config), hidden, config.qkv_bias)
        shapes |= _linears(f"{prefix}.self_attn", {"o_proj": hidden}, config.query_size, config.output_bias)
        shapes |= _linears(f"{prefix}.mlp", up_modules(config), hidden, config.mlp_bias)
        shapes |= _linears(f"{prefix}.mlp", down_module(config), config.intermediate_size, config.mlp_bias)
    return shapes


def _norm(name: str, config: ModelConfig) -> dict[str, Shape]:
    kinds = ("weight", "bias") if config.norm_bias else ("weight",)
    return {f"{name}.{kind}": (config.hidden_size,) for kind in kinds}


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
