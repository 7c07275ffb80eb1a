"""Read the ``ModelConfig`` of a Hugging Face ``config.json``.

Keys that change the result are either read or refused by name. Unknown keys are ignored: an unknown structure shows as
unexpected tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal

from ..errors import ModelError, UnknownArchitecture, quoted, shortened
from .config_fields import Fields
from .families.family import Family
from .families.family_table import BY_ARCHITECTURE, BY_MODEL_TYPE, family_of
from .families.norm_layout import PRE, LayerNorms, QueryGating
from .model_config import (
    ALIBI_DIMS,
    MOST_ALIBI_POSITIONS,
    Activation,
    BlockIndex,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    ParallelScales,
    QueryScaling,
    Rope,
    TokenIndex,
    YarnScaling,
)
from .quantization_config import Quantization, read_quantization
from .read_block_index import SPARSE, read_block_indices
from .read_heads import full_head_dim, read_heads, read_layer_inputs
from .read_mixture import MLP_LIMITS, read_bounds, read_clamp, read_mixtures
from .read_recurrent import own_keys, read_blocks, read_shared_blocks
from .rope_config import has_null_theta, outer_length, read_layer_ropes, read_query_scaling, read_ropes
from .text_config import MULTIMODAL_BY_ARCHITECTURE, Multimodal, language_config, multimodal

WHERE = "config.json"
MAX_LAYERS = 2048
_LONGEST_NAME = 80  # characters of an unknown architecture that are compared with the known ones
MAX_LENGTH = 1 << 30

_BARE, _CLASSIFIER = "Model", "ForSequenceClassification"
_DEFAULT_CLASSES = 2  # Number of classes in the transformers library if a config has no labels.
_MOST_CLASSES = 1 << 16

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_WINDOW_FLAGS, _WINDOW_PERIOD = "hybrid_layer_pattern", 6  # Key and period of MiMo V2's windows.
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")

_ACTIVATIONS: dict[str, Activation | Literal["xielu"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
    "xielu": "xielu",
}

# Keys that no family supports, with the values at which they have no effect (None always has none).
_REFUSED: dict[str, tuple[Any, ...]] = {
    "text_config": (), "vision_config": (), "audio_config": (),
    "num_experts": (0,), "num_local_experts": (0,), "n_routed_experts": (0,), "is_encoder_decoder": (False,),
    "add_cross_attention": (False,), "use_bidirectional_attention": (False,), "is_causal": (True,),
    "pruned_heads": ({},), "rope_interleaved": (False,), "use_mrope": (False,), "use_logn_attn": (False,),
    "use_dynamic_ntk": (False,), "alibi": (False,), "clip_qkv": (),
    "moe_layer_freq": (1,), "rope_interleave": (True,),
}  # fmt: skip

# Keys that only some families have. Other families allow them at the values listed here, at which they have no effect.
_MULTIPLIERS: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (), "embedding_multiplier": (1.0,), "residual_multiplier": (1.0,), "logits_scaling": (1.0,),
}  # fmt: skip
_LAYER_HEADS = "num_attention_heads_per_layer"  # Key of Laguna.
_BIASES = ("attention_bias", "mlp_bias", "attention_out_bias", "use_bias")


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Check and translate the content of a ``config.json``.

    Raises:
        ModelError: an unsupported architecture or feature, or an invalid value.
    """
    config, classes = _as_causal(config)
    family, whole = _family(config)
    config = {family.config_names.get(key, key): value for key, value in config.items()}
    quantization = read_quantization(config)
    towers: tuple[str, ...] = ()
    if whole is not None:
        towers = whole.towers
        _refuse({key: value for key, value in config.items() if key not in whole.inner_configs}, family)
        config = language_config(config, whole, WHERE)
        config = {family.config_names.get(key, key): value for key, value in config.items()}
        quantization = quantization or read_quantization(config)
    _refuse(config, family)
    _check_mxfp4(quantization, family)
    fields = Fields({**_defaults(family, config), **own_keys(config, family, WHERE)}, WHERE)
    if family.windows == "flagged":
        _check_windowed_heads(fields)
    heads = fields.integer("num_attention_heads", high=1 << 16)
    kv_heads = fields.integer("num_key_value_heads", high=1 << 16, default=heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    hidden, vocab = fields.integer("hidden_size"), fields.integer("vocab_size")
    latent = _latent(fields, family, heads, kv_heads) if family.latent else None
    head_dim = latent.cell_dim if latent else _head_dim(fields, hidden, heads)
    biases = frozenset({"qkv"} if family.qkv_bias else ()).union(
        *(parts for key, parts in family.optional_biases.items() if fields.flag(key))
    )
    if (family.head_bias or fields.flag("norm_head")) and fields.flag("tie_word_embeddings"):
        raise fields.wrong("tie_word_embeddings", "false, because this model's head has a bias or is normalised")
    embedding_scale, residual_scale, logit_scale = _scales(fields, family, hidden)
    layers = _layers(fields, family, latent.rotary_dim if latent else head_dim)
    eps_key = family.rms_eps_key if family.rms_eps_key and fields.has(family.rms_eps_key) else family.eps_key
    is_parallel = family.parallel_block if family.parallel_flag is None else fields.flag(family.parallel_flag)
    return ModelConfig(
        family=family.name,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=_mlp_size(fields, family),
        num_heads=heads,
        num_kv_heads=1 if latent else kv_heads,
        head_dim=head_dim + (ALIBI_DIMS if family.alibi else 0),
        max_position_embeddings=_longest(fields, family, layers),
        layers=layers,
        norm="layer" if family.layer_norm and eps_key == family.eps_key else "rms",
        norm_bias=family.norm_bias,
        norm_eps=fields.positive(eps_key),
        norm_offset=family.norm_offset,
        norms=_norms(fields, family, is_parallel=is_parallel),
        parallel_block=is_parallel,
        qk_norm=family.qk_norm if family.qk_norm_flag is None or fields.flag(family.qk_norm_flag) else None,
        head_norms=family.head_norms,
        is_qk_normed_last=family.is_qk_normed_last,
        qkv_modules=family.qkv_modules,
        grouped_qkv=family.grouped_qkv,
        mlp_modules=family.mlp_modules,
        mlp_block=family.mlp_block,
        gated_mlp=family.gated_mlp,
        qkv_bias="qkv" in biases,
        output_bias="output" in biases,
        mlp_bias="mlp" in biases,
        activation=_activation(fields, family),
        attention_sinks=family.attention_sinks,
        windowed_sinks=family.windowed_sinks,
        value_dim=head_dim if family.alibi else _value_dim(fields, family, head_dim),
        alibi=fields.positive("alibi_bias_max", default=8.0) if family.alibi else None,
        embedding_norm=family.embedding_norm,
        value_scale=_value_scale(fields, family),
        attention_scale=_latent_scale(latent, layers) if latent else _attention_scale(fields, family, head_dim),
        attention_soft_cap=fields.optional_positive("attn_logit_softcapping") if family.attention_soft_cap else None,
        logit_soft_cap=fields.optional_positive("final_logit_softcapping") if family.logit_soft_cap else None,
        logit_scale=logit_scale,
        embedding_scale=embedding_scale,
        rounds_embedding_scale=family.scaled_embedding,
        residual_scale=residual_scale,
        tied_head=classes is not None or fields.flag("tie_word_embeddings"),
        head_bias=family.head_bias and classes is None,
        norm_head=family.norm_head and classes is None and fields.flag("norm_head"),
        towers=towers,
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab)), None),
        eos_token_ids=fields.token_ids("eos_token_id", vocab),
        prediction_layers=_prediction_layers(fields, family),
        output_module=family.output_module,
        final_norm=family.final_norm,
        latent=latent,
        gated_attention=_gating(fields, family),
        softplus_gate=family.softplus_gate,
        parallel_scales=_parallel_scales(fields) if family.blocks == "parallel" else None,
        quantization=quantization,
        layer_inputs=read_layer_inputs(fields, family),
        has_layer_scalars=family.layer_scalars,
        has_v_norm=family.v_norm,
        generates=classes is None,
        num_classes=classes or 0,
        learned_positions=family.learned_positions,
        transposed=family.transposed,
        weightless_norms=family.weightless_norms,
        mlp_clamp=read_clamp(fields) if family.clamped_mlp else None,
    )


def _norms(fields: Fields, family: Family, *, is_parallel: bool) -> LayerNorms:
    """Return the names of a layer's norms; of a parallel block with a norm for each of its parts, both."""
    if is_parallel and family.parallel_norms is not None:
        return family.parallel_norms
    key = family.two_norms_key
    return PRE if key is not None and fields.integer(key, high=2, default=1) == 2 else family.norms


def _mlp_size(fields: Fields, family: Family) -> int:
    key = family.mlp_size_key
    size = fields.integer(key if fields.has(key) else family.mlp_size_default or key)
    if family.halved_mlp and size % 2:
        raise fields.wrong(family.mlp_size_key, "an even number (the rows of gate and up together)")
    return size // 2 if family.halved_mlp else size


def _prediction_layers(fields: Fields, family: Family) -> int:
    if (module := family.prediction) is None:
        return 0
    return fields.integer(module.count_key, low=0, high=64, default=module.count)


def _as_causal(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], int | None]:
    """Return the config of the causal model for one without a language head, and the number of its classes.

    Returns:
        The config, and the number of classes of a ``ForSequenceClassification``, 0 for a bare ``Model``, None for any
        other class.

    Raises:
        ModelError: ``id2label`` is not an object with a name for each class.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""
    ending = next((each for each in (_CLASSIFIER, _BARE) if name.endswith(each)), None)
    family = None if ending is None else family_of(f"{name.removesuffix(ending)}ForCausalLM")
    if family is None:
        return config, None
    causal = {**config, "architectures": [family.architecture]}
    if ending == _BARE:
        return causal, 0
    labels = config.get("id2label")
    if labels is not None and not (isinstance(labels, dict) and 1 <= len(labels) <= _MOST_CLASSES):
        raise ModelError(f"{WHERE}: id2label must name 1 to {_MOST_CLASSES} classes.")
    return causal, len(labels) if labels else _DEFAULT_CLASSES


def _check_mxfp4(quantization: Quantization | None, family: Family) -> None:
    """Check that the family is published with MXFP4 experts, if the config has them. Raises ModelError."""
    is_stacked = quantization is not None and quantization.method == "mxfp4"
    if is_stacked and not (family.mixture is not None and family.mixture.mxfp4):
        raise ModelError(f"{WHERE}: quantization_config: mxfp4 is not supported for {family.architecture}.")


def _defaults(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of missing keys, without rotary parameters for a config that has them under their old name."""
    unused = "rope_parameters" if config.get("rope_scaling") else None
    return {key: value for key, value in family.defaults.items() if key != unused}


# Classes of transformers that also compute families whose tensors have other names.
_RENAMED_CLASSES = (["LlamaForCausalLM"], ["Glm4MoeForCausalLM"], ["PhiForCausalLM"])


def _family(config: Mapping[str, Any]) -> tuple[Family, Multimodal | None]:
    """Return the family of the language model, and the row of the multimodal class that contains it, if there is one.

    ``model_type`` decides if ``architectures`` is missing, as in configs that were never saved with a model, and if the
    class belongs to another family whose tensors have other names.
    """
    names, model_type = config.get("architectures"), config.get("model_type")
    typed = BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    if typed is not None and (not names or (typed.tensor_names and names in _RENAMED_CLASSES)):
        return typed, None
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        message = f"{WHERE}: architectures must name one class, not {quoted(names)}."
        raise ModelError(message) if names else UnknownArchitecture(message, str(model_type))
    if whole := multimodal(config, names[0], WHERE):
        return whole.family, whole
    if (family := family_of(names[0])) is None:
        known = BY_ARCHITECTURE.keys() | MULTIMODAL_BY_ARCHITECTURE.keys()
        raise UnknownArchitecture(
            f"{WHERE}: the architecture {shortened(names[0])} is not supported. {nearest(names[0], known)}",
            names[0],
        )
    return family, None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence that names the known architectures most similar to an unknown one, and where all are listed."""
    found = get_close_matches(name[:_LONGEST_NAME], known, n=2, cutoff=0.6)
    like = f"The nearest that is: {' and '.join(found)}. " if found else ""
    return f"{like}All that are: docs/reference/models.md."


def _scales(fields: Fields, family: Family, hidden: int) -> tuple[float, float, float]:
    """Return the factors of the embeddings, of the additions to the residual stream, and of the logits."""
    asked = family.embedding_flag is not None and fields.flag(family.embedding_flag)
    embedding = hidden**0.5 if family.scaled_embedding or asked else 1.0
    if family.blocks == "parallel":
        embedding = fields.positive("embedding_multiplier", default=1.0)
        return embedding, 1.0, fields.positive("lm_head_multiplier", default=1.0)
    if family.logit_scale:
        return embedding, 1.0, fields.positive("logit_scale")
    if not family.multipliers:
        return embedding, 1.0, 1.0
    return (
        fields.positive("embedding_multiplier", default=1.0),
        fields.positive("residual_multiplier", default=1.0),
        1.0 / fields.positive("logits_scaling", default=1.0),
    )


def _parallel_scales(fields: Fields) -> ParallelScales:
    """Return the factors of a Falcon H1. That of attention's input becomes a factor of scores and one of outputs."""
    attention, state = (fields.positive(f"{name}_out_multiplier", default=1.0) for name in ("attention", "ssm"))
    before = fields.positive("ssm_in_multiplier", default=1.0)
    projected = fields.positives("ssm_multipliers", 5) if fields.has("ssm_multipliers") else (1.0,) * 5
    gate, down = fields.positives("mlp_multipliers", 2) if fields.has("mlp_multipliers") else (1.0, 1.0)
    return ParallelScales(
        attention=attention * fields.positive("attention_in_multiplier", default=1.0),
        state=state,
        projected=tuple(before * factor for factor in projected),
        gate=gate,
        down=down,
    )


def _attention_scale(fields: Fields, family: Family, head_dim: int) -> float:
    if family.blocks == "parallel":
        of_input = fields.positive("attention_in_multiplier", default=1.0)
        return float(head_dim**-0.5 * of_input**2 * fields.positive("key_multiplier", default=1.0))
    if family.multipliers:
        return fields.positive("attention_multiplier", default=1.0)
    if family.unit_scale:
        return 1.0
    if family.blocks == "shared":
        return float((head_dim / 2) ** -0.5)
    scalar = fields.positive("query_pre_attn_scalar") if family.query_scalar else head_dim
    return float(scalar**-0.5)


def _latent(fields: Fields, family: Family, heads: int, kv_heads: int) -> LatentConfig:
    if kv_heads != heads:
        raise fields.wrong("num_key_value_heads", f"num_attention_heads {heads} in latent attention")
    return LatentConfig(
        query_rank=fields.integer("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_rank=fields.integer("kv_lora_rank", high=1 << 16),
        plain_dim=fields.integer("qk_nope_head_dim", high=1 << 16),
        rotary_dim=fields.integer("qk_rope_head_dim", high=1 << 16),
        value_dim=fields.integer("v_head_dim", high=1 << 16),
        index=_token_index(fields) if family.indexed else None,
    )


def _token_index(fields: Fields) -> TokenIndex:
    """Return the index of indexed attention. Its queries are computed from the narrow input of attention's queries."""
    found = TokenIndex(
        most=fields.integer("index_topk", high=MAX_LENGTH),
        heads=fields.integer("index_n_heads", high=1 << 16),
        dim=fields.integer("index_head_dim", high=1 << 16),
        interleaved=fields.flag("indexer_rope_interleave"),
    )
    if found.dim < fields.integer("qk_rope_head_dim", high=1 << 16):
        raise fields.wrong("index_head_dim", "at least qk_rope_head_dim, the number of rotated dimensions")
    if not fields.has("q_lora_rank"):
        raise fields.wrong("q_lora_rank", "a number, because the index reads the compressed query of this size")
    return found


def _shared_indices(fields: Fields, family: Family, count: int) -> list[bool]:
    """Return for each layer whether it attends to the tokens that an earlier layer chose, by the published rule."""
    if not family.indexed:
        return [False] * count
    listed: Any = fields.values.get("indexer_types") or fields.values.get("index_topk_pattern")
    if listed is None:
        period = fields.integer("index_topk_freq", default=1)
        first = fields.integer("index_skip_topk_offset", low=0, default=2)
        return [max(index - first + 1, 0) % period != 0 for index in range(count)]
    words = {"F": "full", "S": "shared"}
    kinds = [words.get(letter, letter) for letter in listed] if isinstance(listed, str | list) else []
    if len(kinds) != count or kinds[0] != "full" or not set(kinds) <= {"full", "shared"}:
        raise fields.wrong("indexer_types", f"a list of {count} entries, each full or shared, the first of them full")
    return [kind == "shared" for kind in kinds]


def _latent_scale(latent: LatentConfig, layers: tuple[LayerConfig, ...]) -> float:
    scalings = {layer.rope.scaling for layer in layers if layer.rope is not None}
    factor = next((each.score_factor for each in scalings if isinstance(each, YarnScaling)), 1.0)
    return float(latent.query_dim**-0.5 * factor)


def _refuse(config: Mapping[str, Any], family: Family) -> None:
    """Raise ``ModelError`` for the first key with an unsupported value."""
    for key, harmless in {**_REFUSED, **_unused(family), **family.harmless}.items():
        value = config.get(key)
        if value is not None and value not in harmless and not _is_of_mixture(key, value, family):
            raise ModelError(f"{WHERE}: {key} = {quoted(value)} is not supported for {family.architecture}.")
    remote = config.get("auto_map")
    named = remote.values() if isinstance(remote, dict) else [remote]
    # Fine-tunes keep the "auto_map" of a model that once came with its own code; their type shows that they now use the
    # library's class.
    is_own_code = BY_MODEL_TYPE.get(str(config.get("model_type"))) is not family
    if remote is not None and is_own_code and not all(name in family.remote_code for name in named):
        raise ModelError(
            f"{WHERE}: auto_map asks for code from the model's repository, which is never run, and model_type "
            f"{quoted(config.get('model_type'))} is not that of {family.architecture}."
        )


def _is_of_mixture(key: str, value: Any, family: Family) -> bool:
    """Return whether this family's mixtures read the key, with this value."""
    if family.mixture is None:
        return False
    return key in family.mixture.count_keys or (key == family.mixture.flags_key and isinstance(value, list))


def _unused(family: Family) -> dict[str, tuple[Any, ...]]:
    """Return the keys that other families support and this family does not, with their values without effect."""
    unused: dict[str, tuple[Any, ...]] = {}
    for bias in set(_BIASES) - family.optional_biases.keys():
        unused[bias] = (False,)
    if not family.multipliers:
        unused |= _MULTIPLIERS
    if not family.norm_head:
        unused["norm_head"] = (False,)
    if not family.logit_scale:
        unused["logit_scale"] = (1.0,)
    # Both values of these flags are accepted for a family that always normalises queries and keys: a checkpoint without
    # the norms lacks their tensors, and is refused when its weights are read.
    if family.qk_norm_flag != "use_qk_norm":
        unused["use_qk_norm"] = (False,) if family.qk_norm is None else (False, True)
    unused["qk_layernorm"] = (False,) if family.qk_norm is None else (False, True)
    if family.qkv_bias:
        unused["attention_bias"] = (False, True)
    if not family.attention_soft_cap:
        unused["attn_logit_softcapping"] = ()
    if not family.logit_soft_cap:
        unused["final_logit_softcapping"] = ()
    if not family.query_scalar:
        unused["query_pre_attn_scalar"] = ()
    if family.local_theta != "rope_local_base_freq":
        unused["rope_local_base_freq"] = ()
    if family.no_rope != "listed":
        unused["no_rope_layers"] = ()
    if family.layer_heads_key is None:
        unused[_LAYER_HEADS] = ()
    if family.windows != "chunks":
        unused["attention_chunk_size"] = ()
    if not family.attention_temperature:
        unused["attn_temperature_tuning"] = (False, 0)
    if family.windows in ("never", "chunks"):
        unused["sliding_window"] = ()
        unused["use_sliding_window"] = (False,)
    return unused


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if fields.has("head_dim"):
        return fields.integer("head_dim", high=1 << 16)
    if hidden % heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads {heads}, because head_dim is not set")
    return hidden // heads


def _gating(fields: Fields, family: Family) -> QueryGating | None:
    """Return where the gate of attention's results is, which some families' configs say. Raises ModelError."""
    if family.gating_key is None:
        return family.gated_attention
    match fields.values.get(family.gating_key, True):
        case True | "per-head":
            return "head_module"
        case "per-element":
            return "module"
    raise fields.wrong(family.gating_key, "true, per-head or per-element")


def _value_dim(fields: Fields, family: Family, head_dim: int) -> int | None:
    """Return the dimensions of a value head if it has fewer than a key head, or a factor; else None."""
    if family.value_dim_key is None:
        return None
    found = fields.integer(family.value_dim_key, high=head_dim, default=head_dim)
    return None if found == head_dim and _value_scale(fields, family) == 1.0 else found


def _value_scale(fields: Fields, family: Family) -> float:
    return 1.0 if family.value_dim_key is None else fields.positive("attention_value_scale", default=1.0)


def _check_windowed_heads(fields: Fields) -> None:
    """Check that heads of layers with a window have the sizes of the others (MiMo V2). Raises ModelError."""
    for name in ("num_attention_heads", "head_dim", "v_head_dim"):
        if fields.has(own := f"swa_{name}") and fields.values[own] != fields.values.get(name):
            raise fields.wrong(own, f"{name}, {quoted(fields.values.get(name))}")


def _longest(fields: Fields, family: Family, layers: tuple[LayerConfig, ...]) -> int:
    """Return the longest sequence: with YaRN the extended length, if the length before the extension is named."""
    most = MOST_ALIBI_POSITIONS if family.alibi else MAX_LENGTH
    longest = fields.integer("max_position_embeddings", high=most)
    longest = fields.integer(family.length_key, high=MAX_LENGTH, default=longest)
    named = (fields.mapping(key) for key in ("rope_scaling", "rope_parameters"))
    is_named = outer_length(fields, family) or any("original_max_position_embeddings" in each for each in named)
    if not is_named:
        return longest
    scalings = (layer.rope.scaling for layer in layers if layer.rope is not None)
    extended = (int(each.original_length * each.factor) for each in scalings if isinstance(each, YarnScaling))
    return min(MAX_LENGTH, max(longest, *extended, 0))


def _activation(fields: Fields, family: Family) -> Activation | Literal["xielu"]:
    key = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    name = fields.values.get(key, "silu")
    if name == "gelu" and family.gelu_is_tanh:
        return "gelu_tanh"
    known = {each: kind for each, kind in _ACTIVATIONS.items() if kind != "xielu" or not family.gated_mlp}
    if not isinstance(name, str) or name not in known:
        raise fields.wrong(key, f"one of {', '.join(known)}")
    return known[name]


def _layers(fields: Fields, family: Family, head_dim: int) -> tuple[LayerConfig, ...]:
    count = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    rotary = _rotary_layers(fields, family, count)
    kinds = _layer_types(fields, family, rotary)
    if family.sized_layers:
        kinds = [*kinds[:-1], FULL]  # in the published code whatever the config says
    heads = read_heads(fields, family, kinds)
    full, local = read_ropes(fields, family, head_dim, full_head_dim(heads, head_dim))
    if family.no_rope == "windowed" or (family.no_rope == "full" and fields.has("sliding_window")):
        rotary = [kind == SLIDING for kind in kinds]
    window = _window(fields, family) if SLIDING in kinds else None
    chunk = fields.integer("attention_chunk_size", high=MAX_LENGTH) if CHUNKED in kinds else None
    mixtures = read_mixtures(fields, family.mixture, count)
    if family.no_rope == "sparse":
        forced = fields.integer("prefix_dense_sliding_window_pattern") == 1
        rotary = [kind == SLIDING or (forced and each is None) for kind, each in zip(kinds, mixtures, strict=True)]
    ropes = [
        (local if kind == SLIDING else full) if has_rope else None for kind, has_rope in zip(kinds, rotary, strict=True)
    ]
    if family.layer_thetas:
        ropes = read_layer_ropes(fields, full, count)
    query_scaling, temperature = read_query_scaling(fields, family), _temperature(fields, family)
    blocks = read_blocks(fields, family, count)
    shared, before = _shared_indices(fields, family, count), read_shared_blocks(fields, family, blocks)
    indices = read_block_indices(fields, family, count)
    _check_index_size(fields, indices, full)
    limited = family.mixture is not None and family.mixture.limited
    clamps = read_bounds(fields, MLP_LIMITS, count) if limited else [None] * count
    return tuple(
        LayerConfig(
            window=window if kind == SLIDING else None,
            rope=rope if block.attends else None,
            mixture=mixture if block.takes_mixture else None,
            query_scaling=query_scaling if rope is not None else temperature or query_scaling,
            chunk=chunk if kind == CHUNKED else None,
            recurrent=block.recurrent,
            **own._asdict(),
            has_attention=block.attends,
            has_mlp=block.has_mlp,
            shares_index=is_shared,
            shared_block=in_front,
            block_index=block_index,
            mlp_clamp=None if mixture else clamp,
            norms=family.recurrent_norms if block.recurrent is not None else family.mixture_norms if mixture else None,
        )
        for kind, rope, mixture, block, own, is_shared, in_front, block_index, clamp in zip(
            kinds, ropes, mixtures, blocks, heads, shared, before, indices, clamps, strict=True
        )
    )


def _check_index_size(fields: Fields, indices: list[BlockIndex | None], rope: Rope) -> None:
    """Raise ModelError for an index of blocks whose heads have fewer dimensions than attention rotates."""
    if any(each is not None and each.dim < rope.dim for each in indices):
        raise fields.wrong("index_head_dim", f"at least {rope.dim}, the number of rotated dimensions")


def _window(fields: Fields, family: Family) -> int:
    """Return the size of the sliding window, the token itself included; MiMo V2's own key leaves the token out."""
    if family.windows == "flagged" and fields.has("sliding_window_size"):
        return fields.integer("sliding_window_size", high=MAX_LENGTH) + 1
    return fields.integer("sliding_window", high=MAX_LENGTH)


def _temperature(fields: Fields, family: Family) -> QueryScaling | None:
    """Return the factor of queries in layers without rotary embedding (Llama 4), None without such a factor."""
    if not (family.attention_temperature and fields.values.get("attn_temperature_tuning")):
        return None
    return QueryScaling(fields.positive("attn_scale"), fields.integer("floor_scale", high=MAX_LENGTH), shift=1)


def _rotary_layers(fields: Fields, family: Family, count: int) -> list[bool]:
    """Return for each layer whether it has a rotary embedding, unless that follows from its window."""
    if family.no_rope == "always":
        return [False] * count
    if family.no_rope == "asked":
        kind = fields.values.get("position_embedding_type")
        if kind not in (None, "nope", "rope"):
            raise fields.wrong("position_embedding_type", "rope or nope")
        return [kind == "rope"] * count
    if family.no_rope == "null":
        return [not has_null_theta(fields)] * count
    if family.no_rope != "listed":
        return [True] * count
    listed = fields.values.get("no_rope_layers")  # despite the name, 1 is a layer with rotary embedding
    if listed is None or listed == []:
        interval = fields.integer("no_rope_layer_interval")
        return [(index + 1) % interval != 0 for index in range(count)]
    if not isinstance(listed, list) or len(listed) < count or any(entry not in (0, 1) for entry in listed):
        raise fields.wrong("no_rope_layers", f"a list of {count} ones and zeros")
    return [bool(entry) for entry in listed[:count]]


def _layer_types(fields: Fields, family: Family, rotary: list[bool]) -> list[str]:
    """Return ``full_attention``, ``sliding_attention`` or ``chunked_attention`` for each layer."""
    count, limited = len(rotary), CHUNKED if family.windows == "chunks" else SLIDING
    listed = fields.values.get("layer_types")
    is_recurrent = family.recurrent is not None
    if family.windows == "listed" and is_recurrent and isinstance(listed, list):  # ``read_blocks`` checks the entries
        return [SLIDING if kind == SLIDING else FULL for kind in listed]
    if listed is None or is_recurrent:
        return _derived_types(fields, family, rotary)
    if family.block_index and isinstance(listed, list):
        listed = [FULL if kind == SPARSE else kind for kind in listed]
    if family.indexed and isinstance(listed, list):
        listed = [FULL if kind in _INDEXED else kind for kind in listed]
    if not isinstance(listed, list) or len(listed) != count or any(kind not in (FULL, limited) for kind in listed):
        raise fields.wrong("layer_types", f"a list of {count} entries, each {FULL} or {limited}")
    if family.windows == "flagged" and fields.has(_WINDOW_FLAGS) and listed != _derived_types(fields, family, rotary):
        raise fields.wrong(_WINDOW_FLAGS, f"a list with 1 for the layers that layer_types calls {SLIDING}")
    if family.windows in ("never", "all") and listed != _derived_types(fields, family, rotary):
        raise ModelError(f"{WHERE}: layer_types is not supported for {family.architecture}.")
    if (
        family.windows in ("late", "no_rope", "early", "asked")
        and SLIDING in listed
        and not fields.flag("use_sliding_window")
    ):
        raise ModelError(f"{WHERE}: layer_types has {SLIDING}, but use_sliding_window is not set.")
    return listed


def _derived_types(fields: Fields, family: Family, rotary: list[bool]) -> list[str]:
    if family.windows == "chunks":
        has_chunks = fields.has("attention_chunk_size")
        return [CHUNKED if has_rope and has_chunks else FULL for has_rope in rotary]
    return [SLIDING if sliding else FULL for sliding in _sliding_layers(fields, family, rotary)]


def _sliding_layers(fields: Fields, family: Family, rotary: list[bool]) -> list[bool]:
    """Return for each layer whether it has a sliding window, by the family's published rule."""
    count = len(rotary)
    match family.windows:
        case "never":
            return [False] * count
        case "all":
            return [fields.has("sliding_window")] * count
        case "pattern" | "leading" if not fields.has("sliding_window"):
            return [False] * count
        case "pattern" | "leading" as kind:
            period, shift = fields.integer("sliding_window_pattern"), int(kind == "pattern")
            return [(index + shift) % period != 0 for index in range(count)]
        case "prefixed":
            first = fields.integer("first_k_dense_replace", low=0, high=count)
            periods = [fields.integer(key) for key in ("prefix_dense_sliding_window_pattern", "sliding_window_pattern")]
            return [
                (index + 1 - (first if index >= first else 0)) % periods[index >= first] != 0 for index in range(count)
            ]
        case "flagged":
            return _flagged_windows(fields, count)
    if not (fields.flag("use_sliding_window") and fields.has("sliding_window")):
        return [False] * count
    if family.windows == "asked":
        return [True] * count
    if family.windows == "no_rope":
        return [not has_rope for has_rope in rotary]
    first = fields.integer("max_window_layers", low=0)
    if family.windows == "early":
        return [index < first and index % 2 == 0 for index in range(count)]
    return [index >= first for index in range(count)]


def _flagged_windows(fields: Fields, count: int) -> list[bool]:
    """Return the layers with a window that a list of flags names; by default all but the first and every sixth one."""
    listed = fields.values.get(_WINDOW_FLAGS)
    if listed is None:
        return [index > 0 and (index + 1) % _WINDOW_PERIOD != 0 for index in range(count)]
    if not isinstance(listed, list) or len(listed) != count or any(each not in (0, 1) for each in listed):
        raise fields.wrong(_WINDOW_FLAGS, f"a list of {count} ones and zeros")
    return [each == 1 for each in listed]
