"""Read the ``ModelConfig`` of a GGUF file: translate its metadata to the keys of a ``config.json``.

Values that the metadata lacks follow from the architecture's name, as in llama.cpp, or from the table of tensors:
whether there are biases, and whether the head is untied.
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
from .families.family_table import BY_GGUF_NAME, BY_NAME
from .families.mixture import Mixture, MixtureFamily
from .gguf import GgufFile
from .gguf_end_tokens import gguf_end_tokens
from .gguf_listed_layers import READ_WITH_LISTS, listed_layers
from .gguf_sized_layers import READ_WITH_SIZED_LAYERS, sized_layers
from .hf_config import FULL, SLIDING, model_config, nearest
from .model_config import FrequencyFactors, ModelConfig, Rope

# Metadata keys below the architecture's name whose values are read unchanged.
_RENAMED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}
# More keys whose values are read unchanged, for families that honour them.
# Keys of the epsilon, and whether the norm is a layer norm.
_EPSILONS = {"attention.layer_norm_rms_epsilon": False, "attention.layer_norm_epsilon": True}
_MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_LOGIT_SCALE = {"logit_scale": "logit_scale"}
_ALIBI = {"attention.max_alibi_bias": "alibi_bias_max"}
_GATING = {"softmax": (1,), "sigmoid": (2,)}  # by the router's scores
_LATENT = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
}
# A file with more experts than this and no key for expert groups was written before that key existed.
_MOST_WITHOUT_GROUPS = 64
_GATING_OF_CHOSEN = 3  # a softmax over the chosen experts: one over all, renormalised
_LLAMA4_CHUNK = 8192  # llama.cpp knows no other
# Llama 4 Maverick is recognised by its 128 experts: it has no norms of q and k, and no key says so.
_UNNORMED_EXPERTS = 128
_SHORT_CONV = {"shortconv.l_cache": "conv_L_cache"}
_STATE_SPACE = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
_DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_RECURRENT_LAYERS = "attention.recurrent_layers"
_PREDICTING = "nextn_predict_layers"
_READ_WITH_DELTA = {"ssm.inner_size", "full_attention_interval", _RECURRENT_LAYERS, _PREDICTING}
_READ_WITH_STATE_SPACE = {"ssm.inner_size"}
# Keys that are translated one by one below, or have no effect on the result.
_READ = {
    "attention.key_length", "attention.value_length", "attention.sliding_window",
    "attention.sliding_window_pattern", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "vocab_size",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
_READ_WITH_EXPERTS = {"expert_gating_func", "expert_weights_norm"}
_READ_WITH_SCALED_QUERIES = {"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}
_READ_WITH_LATENT = {"attention.q_lora_rank", "attention.key_length_mla", "rope.scaling.yarn_log_multiplier"}
_NO_EFFECT = {"rope.scaling.finetuned", "tensor_data_layout"}
# Values at which keys have no effect; other values are refused.
_HARMLESS = {
    "attention.causal": True,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "expert_weights_scale": 1.0,  # where no family reads it
}
_DIVISORS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({_DIVISORS, _LONG, _SHORT})
"""Tensors that are read with the config."""
# A tensor of a layer for each part that may have a bias.
_BIASES = {"qkv": ("attn_q", "attn_qkv"), "output": ("attn_output",), "mlp": ("ffn_down",)}


def gguf_model_config(file: GgufFile) -> ModelConfig:
    """Check and translate the metadata. Raises ``ModelError`` naming the key of an unsupported feature."""
    family = _family(file)
    prefix = f"{family.gguf_name}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    renamed = _renamed(family)
    _refuse(own, prefix, renamed.keys() | _read_by(family))
    fields = Fields(own, f"GGUF metadata {family.gguf_name}")
    config = {new: own[old] for old, new in renamed.items() if old in own}
    config |= _shape(file, fields, family) | _windows(fields, family) | _experts(fields, family)
    scaling = _rope(file, fields, family)
    config |= {"rope_parameters": None, "rope_scaling": scaling}
    config |= _flags(file, family) | _recurrent(file, fields, family) | _falcon(file, fields, family)
    if family.gguf_lists:
        config |= listed_layers(file, fields, family, scaling)
    if family.sized_layers:
        config |= sized_layers(file, fields, _factors(file, _DIVISORS) if _DIVISORS in file.tensors else None)
    config |= {
        "architectures": [family.architecture],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf_end_tokens(file.metadata),
    }
    found = _split_experts(_split_mlp(_split_qkv(model_config(config), file), file))
    return found if family.sized_layers else _with_factors(found, file)


def _family(file: GgufFile) -> Family:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in BY_GGUF_NAME:
        raise ModelError(f"The GGUF architecture {quoted(name)} is not supported. {nearest(str(name), BY_GGUF_NAME)}")
    has_window = f"{name}.attention.sliding_window" in file.metadata
    has_experts = bool(file.metadata.get(f"{name}.expert_count"))
    families = [each for each in BY_GGUF_NAME[name] if (each.mixture is not None) is has_experts] or BY_GGUF_NAME[name]
    if all(family.latent for family in families):
        gating = file.metadata.get(f"{name}.expert_gating_func", 1)
        families = [each for each in families if _has_gating(each.mixture, gating)] or families
    return next((family for family in families if (family.windows != "never") is has_window), families[0])


def _has_gating(mixture: MixtureFamily | None, gating: object) -> bool:
    return mixture is not None and isinstance(gating, int) and gating in _GATING[mixture.scores]


def _renamed(family: Family) -> dict[str, str]:
    """Return the keys whose values are read unchanged, with their names in a ``config.json``."""
    own = {key: family.eps_key for key, is_layer_norm in _EPSILONS.items() if is_layer_norm is family.layer_norm}
    own |= {"attention.layer_norm_rms_epsilon": family.rms_eps_key} if family.rms_eps_key else {}
    own |= _MULTIPLIERS if family.multipliers else {}
    own |= _LOGIT_SCALE if family.logit_scale else {}
    own |= _ALIBI if family.alibi else {}
    own |= _LATENT if family.latent else {}
    own |= _SHORT_CONV if family.recurrent == "short_conv" else {}
    own |= _DELTA if family.has_delta else {}
    own |= _STATE_SPACE if family.recurrent == "mamba2" else {}
    own |= {"feed_forward_length": family.mlp_size_key}
    own |= {"nextn_predict_layers": family.prediction.count_key} if family.prediction else {}
    return _RENAMED | own | (_renamed_of_experts(family.mixture) if family.mixture else {})


def _renamed_of_experts(mixture: MixtureFamily) -> dict[str, str]:
    """Return the keys of a mixture of experts whose values are read unchanged, with their names in ``config.json``."""
    found: dict[str, str | None] = {
        "expert_count": mixture.count_keys[0],
        "expert_feed_forward_length": mixture.size_key,
        "expert_shared_feed_forward_length": mixture.shared_size_key if not mixture.shared_count_key else None,
        "expert_shared_count": mixture.shared_count_key,
        "leading_dense_block_count": "first_k_dense_replace" if mixture.dense_layers == "first" else None,
        "interleave_moe_layer_step": "interleave_moe_layer_step" if mixture.dense_layers == "unlisted" else None,
        "expert_weights_scale": "routed_scaling_factor" if mixture.scaled else None,
        "expert_group_count": "n_group" if mixture.grouped else None,
        "expert_group_used_count": "topk_group" if mixture.grouped else None,
    }
    return {old: new for old, new in found.items() if new is not None}


def _read_by(family: Family) -> frozenset[str]:
    """Return the keys that some families translate one by one, or that have no effect in them."""
    experts = _READ_WITH_EXPERTS if family.mixture else set()
    latent = _READ_WITH_LATENT if family.latent else set()
    latent = latent | (_READ_WITH_STATE_SPACE if family.recurrent == "mamba2" else set())
    latent = latent | (_READ_WITH_DELTA if family.has_delta else set())
    latent = latent | (READ_WITH_LISTS if family.gguf_lists else set())
    latent = latent | (READ_WITH_SIZED_LAYERS if family.sized_layers else set())
    return family.gguf_ignored | experts | latent | (_READ_WITH_SCALED_QUERIES if family.scaled_queries else set())


def _experts(fields: Fields, family: Family) -> dict[str, Any]:
    """Check how a file's experts are routed, and count the layers without the MTP layers."""
    if (mixture := family.mixture) is None:
        return {}
    gating = _GATING[mixture.scores] + (
        (_GATING_OF_CHOSEN,) if mixture.scores == "softmax" and mixture.renormalises else ()
    )
    if mixture.scores_key is not None:  # files that name none have a sigmoid
        gating = (*_GATING["sigmoid"], *_GATING["softmax"])
    if fields.integer("expert_gating_func", default=gating[0]) not in gating:
        raise fields.wrong("expert_gating_func", f"{' or '.join(map(str, gating))} ({mixture.scores})")
    known = mixture.gguf_renormalises if mixture.renormalises is None else mixture.renormalises
    renormalises = fields.flag("expert_weights_norm") if fields.has("expert_weights_norm") else known
    if mixture.renormalises is not None and renormalises is not known:
        raise fields.wrong("expert_weights_norm", str(known).lower())
    config: dict[str, Any] = {"norm_topk_prob": renormalises}
    if mixture.scores_key is not None:
        is_sigmoid = fields.integer("expert_gating_func", default=gating[0]) in _GATING["sigmoid"]
        config[mixture.scores_key] = "sigmoid" if is_sigmoid else "softmax"
    if family.prediction is not None:
        behind = fields.integer("nextn_predict_layers", low=0, high=64, default=0)
        config["num_hidden_layers"] = fields.integer("block_count", low=behind + 1) - behind
    return config


_SPLIT_MLP = ("gate_proj", "up_proj", "down_proj")


_SPLIT_QKV = ("q_proj", "k_proj", "v_proj")


def _split_qkv(config: ModelConfig, file: GgufFile) -> ModelConfig:
    """Return the config with separate q, k and v if only the file separates them, not the checkpoint (InternLM 2)."""
    is_split = len(config.qkv_modules) == 1 and "blk.0.attn_q.weight" in file.tensors
    return replace(config, qkv_modules=_SPLIT_QKV, grouped_qkv=False) if is_split else config


def _split_mlp(config: ModelConfig, file: GgufFile) -> ModelConfig:
    """Return the config with separate gate and up if only the file separates them, not the checkpoint (Granite 4)."""
    is_split = len(config.mlp_modules) == 2 and config.gated_mlp and "blk.0.ffn_gate.weight" in file.tensors
    return replace(config, mlp_modules=_SPLIT_MLP) if is_split else config


def _split_experts(config: ModelConfig) -> ModelConfig:
    """Return the config with experts whose matrices are read one by one."""

    def split(mixture: Mixture) -> Mixture:
        names = replace(mixture.names, is_split=mixture.names.storage != "modules")
        if mixture.gated and len(names.shared_modules) == 2:
            names = replace(names, shared_modules=_SPLIT_MLP)
        return replace(mixture, names=names)

    layers = (
        layer if layer.mixture is None else replace(layer, mixture=split(layer.mixture)) for layer in config.layers
    )
    return replace(config, layers=tuple(layers))


def _flags(file: GgufFile, family: Family) -> dict[str, bool]:
    """Return the flags that follow from the file's tensors: biases, and norms of q and k that a config may turn off."""
    # In a hybrid model the first layer may have no attention.
    biased = {name.split(".")[2] for name in file.tensors if name.startswith("blk.") and name.endswith(".bias")}
    found = {part for part, names in _BIASES.items() if not biased.isdisjoint(names)}
    flags = {key: parts <= found for key, parts in family.optional_biases.items()}
    if family.qk_norm_flag is not None and family.head_norms is not None:
        flags[family.qk_norm_flag] = "blk.0.attn_q_norm.weight" in file.tensors
    elif family.qk_norm_flag is not None:
        flags[family.qk_norm_flag] = file.metadata.get(f"{family.gguf_name}.expert_count") != _UNNORMED_EXPERTS
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
    if family.sized_layers or family.gguf_lists:  # see ``sized_layers`` and ``listed_layers``
        return {"vocab_size": embedding.shape[0]}
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    if family.latent:
        return {"vocab_size": embedding.shape[0], "num_key_value_heads": heads, **_latent(fields, family)}
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


def _latent(fields: Fields, family: Family) -> dict[str, Any]:
    """Return the parts of latent attention, and the groups of experts."""
    rotary, groups = fields.integer("rope.dimension_count"), "expert_group_count"
    if not fields.has(groups) and fields.integer("expert_count") > _MOST_WITHOUT_GROUPS:
        raise fields.wrong(groups, "set for so many experts (newer files of the model set it)")
    fields.integer("expert_gating_func", low=1, high=2, default=1)  # has chosen the family
    count = fields.integer(groups, default=1)
    greedy = "greedy" if count == 1 else "group_limited_greedy"
    return {
        "q_lora_rank": fields.values.get("attention.q_lora_rank"),
        "qk_nope_head_dim": fields.integer("attention.key_length_mla", low=rotary + 1) - rotary,
        "n_group": count,
        "topk_group": fields.integer("expert_group_used_count", default=1),
        "topk_method": greedy if family.mixture is not None and family.mixture.scores == "softmax" else None,
    }


def _kv_heads(fields: Fields, family: Family, heads: int) -> int:
    """Return the number of KV heads; in a hybrid file the number in layers with attention."""
    of_layers = fields.values.get("attention.head_count_kv")
    if family.recurrent is None or not isinstance(of_layers, np.ndarray):
        return fields.integer("attention.head_count_kv", default=heads)
    counts = set(of_layers.tolist()) - {0}
    if len(counts) != 1:
        raise fields.wrong("attention.head_count_kv", "the same in all layers with attention")
    return Fields({"attention.head_count_kv": counts.pop()}, fields.where).integer("attention.head_count_kv")


def _recurrent(file: GgufFile, fields: Fields, family: Family) -> dict[str, Any]:
    """Return which layers have attention, and the file's other values of recurrent layers."""
    if family.recurrent is None:
        return {}
    if family.has_delta:
        return _delta(fields)
    of_layers = fields.values.get("attention.head_count_kv")
    if not isinstance(of_layers, np.ndarray):
        raise fields.wrong("attention.head_count_kv", "a list, with 0 for layers without attention")
    if family.recurrent == "mamba2":
        kinds = ["attention" if count else "mamba" for count in of_layers.tolist()]
        return {"layer_types": kinds, **_state_space(file, fields)}
    return {
        "layer_types": ["full_attention" if count else "conv" for count in of_layers.tolist()],
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in file.tensors),
        "block_auto_adjust_ff_dim": False,
    }


def _falcon(file: GgufFile, fields: Fields, family: Family) -> dict[str, Any]:
    """Return Falcon's number of norms and sizes by the keys of its newer form, of which the older one is a case."""
    if family.two_norms_key is None:
        return {}
    return {
        "new_decoder_architecture": True,
        family.two_norms_key: 2 if "blk.0.attn_norm_2.weight" in file.tensors else 1,
        "num_kv_heads": fields.values.get("attention.head_count_kv"),
        "mlp_size": fields.values.get("feed_forward_length"),
    }


def _delta(fields: Fields) -> dict[str, Any]:
    """Return the number of layers of a gated delta net without its MTP layers, and the size of its values."""
    heads, inner = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if inner % heads:
        raise fields.wrong("ssm.inner_size", f"a multiple of ssm.time_step_rank {heads}")
    behind = fields.integer(_PREDICTING, low=0, high=64, default=0)
    count = fields.integer("block_count", low=behind + 1) - behind
    found = {
        "linear_value_head_dim": inner // heads,
        "num_hidden_layers": count,
        "full_attention_interval": fields.integer("full_attention_interval", default=4),
    }
    recurrent = fields.values.get(_RECURRENT_LAYERS)
    if recurrent is None:
        return found
    if not isinstance(recurrent, np.ndarray) or len(recurrent) < count:
        raise fields.wrong(_RECURRENT_LAYERS, "a list with a flag for each layer")
    return found | {"layer_types": ["linear_attention" if flag else FULL for flag in recurrent[:count].tolist()]}


def predicting_layers(file: GgufFile, config: ModelConfig) -> range:
    """Return the MTP layers of a file of gated delta nets or of listed layers, which are not part of the model."""
    family = BY_NAME[config.family]
    if not family.has_delta and not family.gguf_lists:
        return range(0)
    count = file.metadata.get(f"{family.gguf_name}.{_PREDICTING}", 0)
    return range(config.num_layers, config.num_layers + int(count))


def _state_space(file: GgufFile, fields: Fields) -> dict[str, Any]:
    """Return the values of state spaces and positions in a file of Granite 4 H."""
    if not fields.has("attention.scale"):  # files of Bamba have the same architecture's name
        raise fields.wrong("attention.scale", "set, as in files of Granite")
    heads = fields.integer("ssm.time_step_rank")
    inner = fields.integer("ssm.inner_size")
    if inner % heads:
        raise fields.wrong("ssm.inner_size", f"a multiple of ssm.time_step_rank {heads}")
    up = file.tensors.get("blk.0.ffn_up.weight")
    dense = {} if up is None else {"shared_intermediate_size": up.shape[0]}
    return dense | {
        "mamba_expand": None,
        "mamba_d_head": inner // heads,
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in file.tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in file.tensors),
        "position_embedding_type": "rope" if fields.flag("rope.scaling.finetuned") else "nope",
    }


def _windows(fields: Fields, family: Family) -> dict[str, Any]:
    if family.gguf_lists:
        return {}
    window = fields.integer("attention.sliding_window", low=0, high=1 << 30, default=family.gguf_window)
    pattern = fields.values.get("attention.sliding_window_pattern")
    if family.windows == "chunks":
        if pattern is not None or fields.integer("attention.sliding_window", default=_LLAMA4_CHUNK) != _LLAMA4_CHUNK:
            raise fields.wrong("attention.sliding_window", f"absent or {_LLAMA4_CHUNK}, without a pattern")
        return {"attention_chunk_size": _LLAMA4_CHUNK}
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


def _rope(file: GgufFile, fields: Fields, family: Family) -> dict[str, Any]:
    original = {"original_max_position_embeddings": fields.values.get("rope.scaling.original_context_length")}
    attention = fields.positive("rope.scaling.attn_factor", default=1.0)
    if _LONG in file.tensors or _SHORT in file.tensors:
        factors = {"short_factor": list(_factors(file, _SHORT)), "long_factor": list(_factors(file, _LONG))}
        return {"rope_type": "longrope", "attention_factor": attention, **factors, **original}
    if attention != 1.0:
        raise fields.wrong("rope.scaling.attn_factor", "1.0 without rope_factors_long.weight")
    kind = fields.values.get("rope.scaling.type", "none")
    if isinstance(kind, str) and kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": fields.values.get("rope.scaling.factor")}
    return scaling | original | _yarn(fields, family) if kind == "yarn" else scaling


def _yarn(fields: Fields, family: Family) -> dict[str, Any]:
    """Return further parameters of YaRN, by their names in a ``config.json``."""
    found = {name: fields.values.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    if family.scaled_queries:
        found["llama_4_scaling_beta"] = fields.values.get("attention.temperature_scale")
        if fields.has("rope.scaling.yarn_log_multiplier"):
            found |= {"mscale": 1.0, "mscale_all_dim": fields.positive("rope.scaling.yarn_log_multiplier")}
    if family.latent:
        # The file stores a tenth of "mscale_all_dim" and no "mscale": the two are equal in all published models.
        mscale = 10 * fields.positive("rope.scaling.yarn_log_multiplier")
        found |= {"mscale": mscale, "mscale_all_dim": mscale}
    parameters: dict[str, Any] = {key: value for key, value in found.items() if value is not None}
    return parameters if family.gguf_yarn_truncates else parameters | {"truncate": False}


def _with_factors(config: ModelConfig, file: GgufFile) -> ModelConfig:
    """Add the divisors of rotary frequencies in the tensor ``rope_freqs.weight``, if there is one."""
    if _DIVISORS not in file.tensors:
        return config
    scaling = FrequencyFactors(_factors(file, _DIVISORS))
    if BY_NAME[config.family].gguf_lists:
        return _with_full_factors(config, scaling)
    layers = tuple(replace(layer, rope=_divided(layer.rope, scaling)) for layer in config.layers)
    return replace(config, layers=layers)


def _with_full_factors(config: ModelConfig, scaling: FrequencyFactors) -> ModelConfig:
    """Add the divisors to layers with full attention. They may rotate fewer pairs; ones follow theirs."""

    def divided(rope: Rope | None) -> Rope | None:
        pairs = len(scaling.factors) if rope is None else rope.dim // 2
        own, others = FrequencyFactors(scaling.factors[:pairs]), scaling.factors[pairs:]
        return _divided(rope, own if set(others) <= {1.0} else scaling)

    layers = (replace(each, rope=divided(each.rope)) if each.window is None else each for each in config.layers)
    return replace(config, layers=tuple(layers))


def _factors(file: GgufFile, name: str) -> tuple[float, ...]:
    if name not in file.tensors or file.tensors[name].type != "F32":
        raise ModelError(f"The GGUF tensor {name} must exist and have type F32.")
    factors = file.data(name).view("<f4")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(f"The GGUF tensor {name} must contain only finite numbers above 0.")
    return tuple(factors.tolist())


def _divided(rope: Rope | None, scaling: FrequencyFactors) -> Rope | None:
    if rope is None:
        return None
    if len(scaling.factors) != rope.dim // 2 or rope.scaling is not None:
        raise ModelError(
            f"The GGUF tensor rope_freqs.weight must have {rope.dim // 2} elements and be the only rope scaling."
        )
    return replace(rope, scaling=scaling)
