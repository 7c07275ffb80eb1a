"""Read the ``ModelConfig`` of a GGUF file: its metadata translated to the keys of a ``config.json``.

Values that the metadata lacks follow from the architecture's name, as in llama.cpp, or from the table of tensors:
biases, and an untied head.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from ..errors import ModelError, quoted, shortened
from .config_fields import Fields
from .families.family import Family
from .families.family_table import BY_GGUF_NAME
from .gguf import GgufFile
from .gguf_end_tokens import gguf_end_tokens
from .hf_config import FULL, SLIDING, model_config, nearest
from .model_config import FrequencyFactors, ModelConfig, Rope

# Metadata below the architecture's name that is read one to one.
_RENAMED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# The same, for families that honour them.
_EPSILONS = {"attention.layer_norm_rms_epsilon": False, "attention.layer_norm_epsilon": True}  # of layer norms
_MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_LOGIT_SCALE = {"logit_scale": "logit_scale"}
_SHORT_CONV = {"shortconv.l_cache": "conv_L_cache"}
# Translated one by one below, or without effect on the result.
_READ = {
    "attention.key_length", "attention.value_length", "attention.sliding_window",
    "attention.sliding_window_pattern", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "vocab_size",
}  # fmt: skip
_NO_EFFECT = {"rope.scaling.finetuned", "tensor_data_layout"}
# Without effect at these values, refused at others.
_HARMLESS = {"attention.causal": True}
_DIVISORS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({_DIVISORS, _LONG, _SHORT})
"""Tensors that are read with the config."""
# A tensor of the first layer for each part that may have a bias.
_BIASES = {"qkv": ("attn_q", "attn_qkv"), "output": ("attn_output",), "mlp": ("ffn_down",)}


def gguf_model_config(file: GgufFile) -> ModelConfig:
    """Check and translate the metadata. Raises ``ModelError`` naming the key of an unsupported feature."""
    family = _family(file)
    prefix = f"{family.gguf_name}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    renamed = _renamed(family)
    _refuse(own, prefix, renamed.keys() | family.gguf_ignored)
    fields = Fields(own, f"GGUF metadata {family.gguf_name}")
    config = {new: own[old] for old, new in renamed.items() if old in own}
    config |= _shape(file, fields, family) | _windows(fields, family) | _rope(file, fields)
    config |= (
        _flags(file, family)
        | _recurrent(file, fields, family)
        | {
            "architectures": [family.architecture],
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": gguf_end_tokens(file.metadata),
        }
    )
    return _with_factors(model_config(config), file)


def _family(file: GgufFile) -> Family:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in BY_GGUF_NAME:
        raise ModelError(f"The GGUF architecture {quoted(name)} is not supported. {nearest(str(name), BY_GGUF_NAME)}")
    has_window = f"{name}.attention.sliding_window" in file.metadata
    has_experts = bool(file.metadata.get(f"{name}.expert_count"))
    families = [each for each in BY_GGUF_NAME[name] if (each.mixture is not None) is has_experts] or BY_GGUF_NAME[name]
    return next((family for family in families if (family.windows != "never") is has_window), families[0])


def _renamed(family: Family) -> dict[str, str]:
    """Return the keys that are read one to one, with their names in a ``config.json``."""
    own = {key: family.eps_key for key, is_layer_norm in _EPSILONS.items() if is_layer_norm is family.layer_norm}
    own |= _MULTIPLIERS if family.multipliers else {}
    own |= _SHORT_CONV if family.recurrent == "short_conv" else {}
    return _RENAMED | own | (_LOGIT_SCALE if family.logit_scale else {})


def _flags(file: GgufFile, family: Family) -> dict[str, bool]:
    """Return what follows from the tensors that are there: biases, and norms of q and k that a config may turn off."""
    found = {part for part, names in _BIASES.items() if any(f"blk.0.{name}.bias" in file.tensors for name in names)}
    flags = {key: parts <= found for key, parts in family.optional_biases.items()}
    if family.qk_norm_flag is not None:
        flags[family.qk_norm_flag] = "blk.0.attn_q_norm.weight" in file.tensors
    if family.mixture is not None:  # llama.cpp knows by the architecture
        flags["norm_topk_prob"] = family.mixture.gguf_renormalises
    return flags


def _refuse(own: dict[str, Any], prefix: str, read: Set[str]) -> None:
    for key, value in own.items():
        if key in read or key in _READ or key in _NO_EFFECT:
            continue
        if key not in _HARMLESS or isinstance(value, np.ndarray) or value != _HARMLESS[key]:
            raise ModelError(f"GGUF metadata {prefix}{shortened(key)} is not supported.")


def _shape(file: GgufFile, fields: Fields, family: Family) -> dict[str, Any]:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError("The GGUF file has no matrix token_embd.weight.")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", default=hidden // heads)
    if fields.integer("attention.value_length", default=head_dim) != head_dim:
        raise fields.wrong("attention.value_length", f"equal to attention.key_length {head_dim}")
    shape = {
        "vocab_size": embedding.shape[0],
        "head_dim": head_dim,
        "num_key_value_heads": _kv_heads(fields, family, heads),
        "partial_rotary_factor": Fraction(fields.integer("rope.dimension_count", default=head_dim), head_dim),
    }
    if family.query_scalar:
        wide = fields.integer("block_count") == family.wide_layers
        shape["query_pre_attn_scalar"] = hidden // heads if wide else head_dim
    return shape


def _kv_heads(fields: Fields, family: Family, heads: int) -> int:
    """Return the number of KV heads, in a hybrid file of the layers with attention."""
    of_layers = fields.values.get("attention.head_count_kv")
    if family.recurrent is None or not isinstance(of_layers, np.ndarray):
        return fields.integer("attention.head_count_kv", default=heads)
    counts = set(of_layers.tolist()) - {0}
    if len(counts) != 1:
        raise fields.wrong("attention.head_count_kv", "the same in all layers with attention")
    return Fields({"attention.head_count_kv": counts.pop()}, fields.where).integer("attention.head_count_kv")


def _recurrent(file: GgufFile, fields: Fields, family: Family) -> dict[str, Any]:
    """Return the layers with attention, and what else of a short convolution the tensors say."""
    if family.recurrent is None:
        return {}
    of_layers = fields.values.get("attention.head_count_kv")
    if not isinstance(of_layers, np.ndarray):
        raise fields.wrong("attention.head_count_kv", "a list, with 0 for layers without attention")
    return {
        "layer_types": ["full_attention" if count else "conv" for count in of_layers.tolist()],
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in file.tensors),
        "block_auto_adjust_ff_dim": False,
    }


def _windows(fields: Fields, family: Family) -> dict[str, Any]:
    window = fields.integer("attention.sliding_window", low=0, high=1 << 30, default=family.gguf_window)
    pattern = fields.values.get("attention.sliding_window_pattern")
    if window and family.windows not in ("all", "pattern"):
        raise fields.wrong("attention.sliding_window", "absent")
    if pattern is not None and family.windows != "pattern":
        raise fields.wrong("attention.sliding_window_pattern", "absent")
    if not window:
        return {"sliding_window": None, "sliding_window_pattern": 1}
    result: dict[str, Any] = {"sliding_window": window}
    if isinstance(pattern, np.ndarray):  # one flag for each layer
        result["layer_types"] = [SLIDING if flag else FULL for flag in pattern.tolist()]
    elif pattern is not None:
        result["sliding_window_pattern"] = fields.integer("attention.sliding_window_pattern")
    return result


def _rope(file: GgufFile, fields: Fields) -> dict[str, Any]:
    original = {"original_max_position_embeddings": fields.values.get("rope.scaling.original_context_length")}
    attention = fields.positive("rope.scaling.attn_factor", default=1.0)
    if _LONG in file.tensors or _SHORT in file.tensors:
        factors = {"short_factor": list(_factors(file, _SHORT)), "long_factor": list(_factors(file, _LONG))}
        return {"rope_scaling": {"rope_type": "longrope", "attention_factor": attention, **factors, **original}}
    if attention != 1.0:
        raise fields.wrong("rope.scaling.attn_factor", "1.0 without rope_factors_long.weight")
    kind = fields.values.get("rope.scaling.type", "none")
    if isinstance(kind, str) and kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": fields.values.get("rope.scaling.factor")}
    return {"rope_scaling": scaling | original if kind == "yarn" else scaling}


def _with_factors(config: ModelConfig, file: GgufFile) -> ModelConfig:
    """Add the divisors of rotary frequencies in the tensor ``rope_freqs.weight``, if there is one."""
    if _DIVISORS not in file.tensors:
        return config
    scaling = FrequencyFactors(_factors(file, _DIVISORS))
    layers = tuple(replace(layer, rope=_divided(layer.rope, scaling)) for layer in config.layers)
    return replace(config, layers=layers)


def _factors(file: GgufFile, name: str) -> tuple[float, ...]:
    if name not in file.tensors or file.tensors[name].type != "F32":
        raise ModelError(f"The GGUF tensor {name} must be there, of type F32.")
    factors = file.data(name).view("<f4")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(f"The GGUF tensor {name} must have finite numbers above 0.")
    return tuple(factors.tolist())


def _divided(rope: Rope | None, scaling: FrequencyFactors) -> Rope | None:
    if rope is None:
        return None
    if len(scaling.factors) != rope.dim // 2 or rope.scaling is not None:
        raise ModelError(
            f"The GGUF tensor rope_freqs.weight must have {rope.dim // 2} elements and be the only rope scaling."
        )
    return replace(rope, scaling=scaling)
