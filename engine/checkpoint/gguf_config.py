"""Read the ``ModelConfig`` of a GGUF file: its metadata translated to the keys of a ``config.json``.

Values that the metadata lacks follow from the architecture's name, as in llama.cpp, or from the table of tensors:
biases, and an untied head.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from ..errors import ModelError, quoted, shortened
from .config_fields import Fields
from .families import BY_GGUF_NAME, BY_NAME, Family
from .gguf import GgufFile
from .gguf_end_tokens import gguf_end_tokens
from .hf_config import FULL, SLIDING, model_config
from .model_config import FrequencyFactors, ModelConfig, Rope

# Metadata below the architecture's name that is read one to one.
_RENAMED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Translated one by one below, or without effect on the result.
_READ = {
    "attention.key_length", "attention.value_length", "attention.sliding_window",
    "attention.sliding_window_pattern", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "vocab_size",
}  # fmt: skip
_NO_EFFECT = {"rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"}
# Without effect at these values, refused at others.
_HARMLESS = {"attention.causal": True, "rope.scaling.attn_factor": 1.0}


def gguf_model_config(file: GgufFile) -> ModelConfig:
    """Check and translate the metadata. Raises ``ModelError`` naming the key of an unsupported feature."""
    name, family = _family(file)
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    _refuse(own, prefix)
    fields = Fields(own, f"GGUF metadata {name}")
    config = {new: own[old] for old, new in _RENAMED.items() if old in own}
    config |= _shape(file, fields, family) | _windows(fields, family) | _rope(fields)
    config |= {
        "architectures": [family.architecture],
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf_end_tokens(file.metadata),
    }
    if family.mixture is not None:  # llama.cpp knows by the architecture
        config["norm_topk_prob"] = family.mixture.gguf_renormalises
    return _with_factors(model_config(config), file)


def _family(file: GgufFile) -> tuple[str, Family]:
    """Return the architecture's name in the file, and the family."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in BY_GGUF_NAME:
        raise ModelError(
            f"The GGUF architecture {quoted(name)} is not supported; supported are {', '.join(sorted(BY_GGUF_NAME))}."
        )
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return name, BY_NAME["mixtral"]
    return name, BY_GGUF_NAME[name]


def _refuse(own: dict[str, Any], prefix: str) -> None:
    for key, value in own.items():
        if key in _RENAMED or key in _READ or key in _NO_EFFECT:
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
        "num_key_value_heads": fields.integer("attention.head_count_kv", default=heads),
        "partial_rotary_factor": Fraction(fields.integer("rope.dimension_count", default=head_dim), head_dim),
    }
    if family.query_scalar:
        wide = fields.integer("block_count") == family.wide_layers
        shape["query_pre_attn_scalar"] = hidden // heads if wide else head_dim
    return shape


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


def _rope(fields: Fields) -> dict[str, Any]:
    kind = fields.values.get("rope.scaling.type", "none")
    if isinstance(kind, str) and kind == "none":
        return {}
    if kind == "yarn":  # original length and factors have keys of their own, not read here
        raise ModelError("The rope type 'yarn' is not supported in GGUF files; it is in safetensors.")
    return {"rope_scaling": {"rope_type": kind, "factor": fields.values.get("rope.scaling.factor")}}


def _with_factors(config: ModelConfig, file: GgufFile) -> ModelConfig:
    """Add the divisors of rotary frequencies in the tensor ``rope_freqs.weight``, if there is one."""
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file.tensors:
            raise ModelError(f"The GGUF file has {name}: the rope type longrope is not supported.")
    if "rope_freqs.weight" not in file.tensors:
        return config
    scaling = FrequencyFactors(_factors(file))
    layers = tuple(replace(layer, rope=_divided(layer.rope, scaling)) for layer in config.layers)
    return replace(config, layers=layers)


def _factors(file: GgufFile) -> tuple[float, ...]:
    if file.tensors["rope_freqs.weight"].type != "F32":
        raise ModelError("The GGUF tensor rope_freqs.weight must be of type F32.")
    factors = file.data("rope_freqs.weight").view("<f4")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError("The GGUF tensor rope_freqs.weight must have finite numbers above 0.")
    return tuple(factors.tolist())


def _divided(rope: Rope | None, scaling: FrequencyFactors) -> Rope | None:
    if rope is None:
        return None
    if len(scaling.factors) != rope.dim // 2 or rope.scaling is not None:
        raise ModelError(
            f"The GGUF tensor rope_freqs.weight must have {rope.dim // 2} elements and be the only rope scaling."
        )
    return replace(rope, scaling=scaling)
