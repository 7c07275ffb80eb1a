"""Read from a config the layers with a recurrent state, and the keys that only such families have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from math import inf
from typing import Any, NamedTuple

from .config_fields import Fields
from .families.family import Family, Recurrent
from .families.recurrent import (
    DeltaLayer,
    KimiDeltaLayer,
    Mamba2Layer,
    MambaLayer,
    RecurrentLayer,
    SelectionNorms,
    ShortConvLayer,
)
from .model_config import SharedBlock
from .read_block_index import block_index_keys
from .read_mixture import is_dense
from .read_step import step_keys
from .rope_config import DEFAULT_THETA

ATTENTION, RECURRENT, MLP, MIXTURE = "attention", "recurrent", "mlp", "moe"
_KINDS = {
    "full_attention": ATTENTION,
    "sliding_attention": ATTENTION,
    "attention": ATTENTION,
    "conv": RECURRENT,
    "mamba": RECURRENT,
    "linear_attention": RECURRENT,
    "hybrid": ATTENTION,  # Attention, followed by a recurrent state.
    "mlp": MLP,
    "moe": MIXTURE,
}
_OF_PARALLEL = frozenset({"mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate"})  # keys of Falcon H1
_PATTERN = "hybrid_override_pattern"
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # letters of the pattern
_NAMES = {
    "short_conv": ("full_attention", "conv"),
    "weighted_mamba": ("attention", "full_attention", "mamba", "linear_attention"),
    "mamba2": ("attention", "full_attention", "mamba", "linear_attention"),
    "delta": ("full_attention", "linear_attention"),
    "grouped_delta": ("full_attention", "linear_attention"),
    "separate_delta": ("full_attention", "linear_attention"),
    "kimi_delta": ("full_attention", "linear_attention"),
    "wide_kimi_delta": ("full_attention", "linear_attention"),
}
_READERS: Mapping[Recurrent, Callable[[Fields], RecurrentLayer]] = {
    "short_conv": lambda fields: _short_conv(fields),
    "mamba": lambda fields: _mamba(fields, "none"),
    "normed_mamba": lambda fields: _mamba(fields, "plain"),
    "weighted_mamba": lambda fields: _mamba(fields, "weighted"),
    "mamba2": lambda fields: _mamba2(fields),
    "delta": lambda fields: _delta(fields, grouped=False),
    "grouped_delta": lambda fields: _delta(fields, grouped=True),
    "separate_delta": lambda fields: _separate_delta(fields),
    "kimi_delta": lambda fields: _kimi_delta(fields),
    "wide_kimi_delta": lambda fields: _wide_kimi_delta(fields),
}
_INDICES = ("full_attn_idxs", "attn_layer_indices")  # keys of LFM2 and of Bamba
_INTERVAL = "full_attention_interval"
_PERIOD, _OFFSET = "attn_layer_period", "attn_layer_offset"  # keys of Jamba
MAX_PERIOD = 2048
_INFINITY = {"__float__": "Infinity"}  # as transformers writes it
_LARGEST_FLOAT32 = 3.4028234e38
_MOST_TAPS = 8
# Of 54 layers, those behind a shared block where a file lists none, as in the published 2.7B.
_ZAMBA_LAYERS = ["hybrid" if index in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "mamba" for index in range(54)]
_ZAMBA_EPS = 1e-5  # Epsilon of the norm after the state space, independent of the other norms.
_SEPARATE_EPS = 1e-5  # the same of OLMo Hybrid's delta nets
_MOST_HEADS = 1 << 16


class Blocks(NamedTuple):
    """The blocks of a layer.

    Attributes:
        attends: whether the layer has attention.
        recurrent: a mixer with a recurrent state, in place of attention or beside it.
        has_mlp: whether the layer has an MLP.
        takes_mixture: whether that MLP may be a mixture of experts.
    """

    attends: bool
    recurrent: RecurrentLayer | None = None
    has_mlp: bool = True
    takes_mixture: bool = True


def read_blocks(fields: Fields, family: Family, count: int) -> tuple[Blocks, ...]:
    """Return the blocks of each layer.

    Raises:
        ModelError: a value is invalid or requests a feature that is not computed, or no layer has attention in a family
            with attention.
    """
    if family.recurrent is None:
        return (Blocks(attends=True),) * count
    layer = _READERS[family.recurrent](_own_fields(fields, family))
    match family.blocks:
        case "recurrent":
            return (Blocks(False, layer, has_mlp=False, takes_mixture=False),) * count
        case "parallel":
            return (Blocks(True, layer),) * count
        case "single":
            kinds = _kinds(fields, (*_NAMES[family.recurrent], MLP, MIXTURE), count)
            return tuple(_single(kind, layer) for kind in kinds)
        case "shared":
            assert isinstance(layer, Mamba2Layer)
            behind = replace(layer, norm_eps=_ZAMBA_EPS)
            kinds = _kinds(fields, ("mamba", "linear_attention", "hybrid"), count)
            return tuple(Blocks(kind == ATTENTION, behind, has_mlp=False, takes_mixture=False) for kind in kinds)
    windows = ("sliding_attention",) if family.windows == "listed" else ()
    kinds = _kinds(fields, (*_NAMES[family.recurrent], *windows), count)
    return tuple(Blocks(True) if kind == ATTENTION else Blocks(False, layer) for kind in kinds)


def _own_fields(fields: Fields, family: Family) -> Fields:
    """Return the fields without the keys that only one family reads and files of other families may contain."""
    if family.blocks == "parallel":
        return fields
    return Fields({key: value for key, value in fields.values.items() if key not in _OF_PARALLEL}, fields.where)


def read_shared_blocks(fields: Fields, family: Family, blocks: tuple[Blocks, ...]) -> tuple[SharedBlock | None, ...]:
    """Return for each layer the block of attention and MLP in front of its state space, None for a layer without one.

    The first ``num_mem_blocks`` layers with a block have weights of their own, and later ones repeat them in turn.

    Raises:
        ModelError: a value is invalid.
    """
    if family.blocks != "shared":
        return (None,) * len(blocks)
    count = fields.integer("num_mem_blocks", high=MAX_PERIOD)
    rank, adapts = fields.integer("adapter_rank", high=_MOST_HEADS), fields.flag("use_shared_attention_adapter")
    heads = fields.integer("num_attention_heads")
    if adapts and fields.integer("num_key_value_heads", default=heads) != heads:
        raise fields.wrong("num_key_value_heads", f"num_attention_heads {heads} with use_shared_attention_adapter")
    places = [index for index, block in enumerate(blocks) if block.attends]
    found = {
        index: SharedBlock(source=places[number % count], number=number, rank=rank, adapts_attention=adapts)
        for number, index in enumerate(places)
    }
    return tuple(found.get(index) for index in range(len(blocks)))


def _single(kind: str, layer: RecurrentLayer) -> Blocks:
    """Return a layer of one block."""
    is_mixer, state = kind in (ATTENTION, RECURRENT), layer if kind == RECURRENT else None
    return Blocks(kind == ATTENTION, state, has_mlp=not is_mixer, takes_mixture=kind == MIXTURE)


def _short_conv(fields: Fields) -> ShortConvLayer:
    return ShortConvLayer(fields.integer("conv_L_cache", low=2, high=_MOST_TAPS), fields.flag("conv_bias"))


def _mamba(fields: Fields, norms: SelectionNorms) -> MambaLayer:
    hidden = fields.integer("hidden_size")
    if fields.values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.wrong("hidden_act", "silu, the activation of the convolution too")
    rank = fields.values.get("mamba_dt_rank")
    return MambaLayer(
        width=fields.integer("mamba_d_inner", default=int(fields.positive("mamba_expand") * hidden)),
        state_size=fields.integer("mamba_d_state", high=_MOST_HEADS),
        taps=fields.integer("mamba_d_conv", low=2, high=_MOST_TAPS),
        step_rank=-(-hidden // 16) if rank in (None, "auto") else fields.integer("mamba_dt_rank", high=_MOST_HEADS),
        conv_biased=fields.flag("mamba_conv_bias"),
        biased=fields.flag("mamba_proj_bias"),
        norms=norms,
        norm_eps=0.0 if norms == "none" else fields.positive("mixer_rms_eps" if norms == "plain" else "rms_norm_eps"),
    )


def _mamba2(fields: Fields) -> Mamba2Layer:
    heads = fields.integer("mamba_n_heads", high=_MOST_HEADS)
    if fields.has("mamba_d_ssm"):
        width = fields.integer("mamba_d_ssm")
    elif fields.has("mamba_expand"):
        width = int(fields.positive("mamba_expand") * fields.integer("hidden_size"))
    else:
        width = heads * fields.integer("mamba_d_head", high=_MOST_HEADS)
    if width % heads or fields.values.get("mamba_d_head") not in (None, "auto", width // heads):
        whole = "mamba_d_ssm" if fields.has("mamba_d_ssm") else "mamba_expand * hidden_size"
        raise fields.wrong("mamba_d_head", f"{whole} / mamba_n_heads = {width} / {heads}")
    groups = fields.integer("mamba_n_groups", high=heads)
    if heads % groups:
        raise fields.wrong("mamba_n_groups", f"a divisor of mamba_n_heads {heads}")
    if not _is_unlimited(fields.values.get("time_step_limit")):
        raise fields.wrong("time_step_limit", "[0.0, Infinity]")
    activation = "mamba_hidden_act" if fields.has("mamba_hidden_act") else "hidden_act"
    if fields.values.get(activation, "silu") not in ("silu", "swish"):
        raise fields.wrong(activation, "silu, the activation of the convolution too")
    return Mamba2Layer(
        num_heads=heads,
        head_dim=width // heads,
        num_groups=groups,
        state_size=fields.integer("mamba_d_state", high=_MOST_HEADS),
        taps=fields.integer("mamba_d_conv", low=2, high=_MOST_TAPS),
        conv_biased=fields.flag("mamba_conv_bias"),
        biased=fields.flag("mamba_proj_bias"),
        normed=not fields.has("mamba_rms_norm") or fields.flag("mamba_rms_norm"),
        is_norm_first=fields.flag("mamba_norm_before_gate"),
    )


def _is_unlimited(limit: object) -> bool:
    """Return whether a limit of time steps has no effect: a step is a softplus in float32, and so never infinite."""
    if limit is None:
        return True
    if not isinstance(limit, list) or len(limit) != 2 or limit[0] != 0.0:
        return False
    high = inf if limit[1] == _INFINITY else limit[1]
    return isinstance(high, float) and high >= _LARGEST_FLOAT32


def _delta(fields: Fields, *, grouped: bool) -> DeltaLayer:
    heads = fields.integer("linear_num_value_heads", high=_MOST_HEADS)
    key_heads = fields.integer("linear_num_key_heads", high=heads)
    if heads % key_heads:
        raise fields.wrong("linear_num_key_heads", f"a divisor of linear_num_value_heads {heads}")
    if fields.values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.wrong("hidden_act", "silu, the activation of the convolution too")
    return DeltaLayer(
        num_heads=heads,
        head_dim=fields.integer("linear_value_head_dim", high=_MOST_HEADS),
        num_key_heads=key_heads,
        key_dim=fields.integer("linear_key_head_dim", high=_MOST_HEADS),
        taps=fields.integer("linear_conv_kernel_dim", low=2, high=_MOST_TAPS),
        grouped=grouped,
    )


def _separate_delta(fields: Fields) -> DeltaLayer:
    layer = _delta(fields, grouped=False)
    factor = 2.0 if fields.flag("linear_allow_neg_eigval") else 1.0
    return replace(layer, separate=True, rate_factor=factor, norm_eps=_SEPARATE_EPS)


def _kimi_delta(fields: Fields) -> KimiDeltaLayer:
    if fields.values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.wrong("hidden_act", "silu, the activation of the convolution too")
    return KimiDeltaLayer(
        num_heads=fields.integer("linear_num_heads", high=_MOST_HEADS),
        head_dim=fields.integer("linear_head_dim", high=_MOST_HEADS),
        taps=fields.integer("linear_conv_kernel_dim", low=2, high=_MOST_TAPS),
    )


def _wide_kimi_delta(fields: Fields) -> KimiDeltaLayer:
    bound = None
    if fields.flag("kda_safe_gate"):
        bound = fields.values.get("kda_lower_bound")
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not float("-inf") < bound < 0:
            raise fields.wrong("kda_lower_bound", "a number below 0")
    return replace(_kimi_delta(fields), narrow=False, lower_bound=None if bound is None else float(bound))


def _kinds(fields: Fields, names: tuple[str, ...], count: int) -> list[str]:
    """Return ``ATTENTION`` or ``RECURRENT`` for each layer, also from the older keys."""
    key = "layers_block_type" if fields.has("layers_block_type") else "layer_types"
    listed = fields.values.get(key)
    if listed is None and fields.has(_PERIOD):
        period = fields.integer(_PERIOD, high=MAX_PERIOD)
        offset = fields.integer(_OFFSET, low=0, high=period - 1)
        return [ATTENTION if index % period == offset else RECURRENT for index in range(count)]
    if listed is None and fields.has(_INTERVAL):
        interval = fields.integer(_INTERVAL, high=count)
        return [RECURRENT if (index + 1) % interval else ATTENTION for index in range(count)]
    if listed is None:
        # As in transformers, a convolution model that lists no layer has attention in all layers, and a Mamba-2 model
        # in none.
        is_convolution = "conv" in names
        key = next((key for key in _INDICES if fields.has(key)), _INDICES[0] if is_convolution else "layer_types")
        indices = fields.values.get(key)
        indices = list(range(count) if is_convolution else ()) if indices is None else indices
        if not isinstance(indices, list) or any(type(each) is not int or not 0 <= each < count for each in indices):
            raise fields.wrong(key, f"a list of layer indices below {count}")
        if not indices:
            raise fields.wrong(key, "a list of at least one layer")
        return [ATTENTION if index in indices else RECURRENT for index in range(count)]
    if not isinstance(listed, list) or len(listed) != count or any(kind not in names for kind in listed):
        raise fields.wrong(key, f"a list of {count} entries, each {' or '.join(names)}")
    kinds = [_KINDS[kind] for kind in listed]
    if ATTENTION not in kinds:
        raise fields.wrong(key, "a list with attention at least once")
    return kinds


def own_keys(config: Mapping[str, Any], family: Family, where: str) -> Mapping[str, Any]:
    """Return a config with the usual keys in place of the family's own keys. Raises ModelError."""
    fields = Fields({**family.defaults, **config}, where)
    if family.alibi:
        return {**config, **_alibi_keys(fields, family)}
    if "rotary_dim" in family.defaults:
        return {**config, **_phi_keys(fields)}
    if family.learned_positions:
        return {**config, **_gpt_keys(fields)}
    if "new_decoder_architecture" in family.defaults:
        return {**config, **_falcon_keys(fields)}
    if "scale_depth" in family.defaults:
        return {**config, **_minicpm_keys(fields)}
    if family.mixture is not None and family.mixture.limited:
        return {**config, **step_keys(fields)}
    if family.block_index:
        return {**config, **_minimax_keys(fields)}
    if family.partial_rotary and fields.has("rotary_dim") and fields.has("head_dim"):
        rotated = Fraction(fields.integer("rotary_dim"), fields.integer("head_dim"))
        return {**config, "partial_rotary_factor": rotated}
    if "rope_ratio" in family.defaults:
        return {**config, "rope_theta": DEFAULT_THETA * fields.positive("rope_ratio")}
    if family.recurrent == "short_conv" and family.windows == "listed":
        return {**config, **_lfm3_keys(fields)}
    if family.recurrent == "short_conv":
        return {**config, **_lfm2_keys(fields)}
    if family.recurrent == "kimi_delta":
        return {**config, **_kimi_keys(fields)}
    if family.recurrent == "wide_kimi_delta":
        return {**config, **_ling_keys(fields)}
    if family.recurrent == "separate_delta":
        return {**config, **_separate_keys(fields)}
    if family.blocks == "single":
        return {**config, **_pattern_keys(fields)}
    if family.blocks == "shared":
        return {**config, **_zamba_keys(fields)}
    if family.recurrent == "mamba2" and family.mixture is not None and is_dense(fields, family.mixture):
        return {**config, "intermediate_size": fields.integer("shared_intermediate_size")}
    return config


def _minicpm_keys(fields: Fields) -> dict[str, Any]:
    """Return the factors of MiniCPM 3 by their usual names, and the dimensions of a value head."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    depth = fields.integer("num_hidden_layers") ** 0.5
    return {
        "embedding_multiplier": fields.positive("scale_emb"),
        "residual_multiplier": fields.positive("scale_depth", default=depth) / depth,
        "logits_scaling": hidden / fields.integer("dim_model_base", default=hidden),
        "v_head_dim": fields.integer("v_head_dim", default=hidden // heads),
    }


def _minimax_keys(fields: Fields) -> dict[str, Any]:
    """Return the part of a head that is rotated, which files may name twice, and the keys of an index of blocks."""
    found = block_index_keys(fields)
    if fields.has("rotary_dim"):
        rotated = Fraction(fields.integer("rotary_dim"), fields.integer("head_dim"))
        key = "partial_rotary_factor"
        named = fields.mapping("rope_parameters").get(key, fields.values.get(key))
        if named is not None and named != rotated:
            raise fields.wrong("rotary_dim", f"{key} {named} of head_dim {fields.integer('head_dim')}")
        found[key] = rotated
    return found


def _pattern_keys(fields: Fields) -> dict[str, Any]:
    """Return the number of layers and their kinds, which older files give as a string with one letter per layer."""
    kinds, pattern = fields.values.get("layers_block_type") or fields.values.get("layer_types"), None
    if kinds is None and fields.has(_PATTERN):
        pattern = fields.values[_PATTERN]
        if not isinstance(pattern, str) or not pattern or not set(pattern) <= _LETTERS.keys():
            raise fields.wrong(_PATTERN, f"a string of {' '.join(_LETTERS)}")
        kinds = [_LETTERS[letter] for letter in pattern]
    if not isinstance(kinds, list) or not kinds:
        raise fields.wrong("layers_block_type", "a list of at least one layer")
    return {"layers_block_type": kinds, "num_hidden_layers": len(kinds)}


def _falcon_keys(fields: Fields) -> dict[str, Any]:
    """Return the number of KV heads and of norms, which follow from the form of the decoder, and the MLP's size."""
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    is_new = fields.flag("new_decoder_architecture")
    single = fields.flag("multi_query") and not is_new
    norms = fields.integer("num_ln_in_parallel_attn", high=2, default=2 if is_new else 1)
    return {
        "num_key_value_heads": 1 if single else fields.integer("num_kv_heads", default=heads),
        "num_ln_in_parallel_attn": norms if is_new else 1,
        "intermediate_size": fields.integer("mlp_size", default=4 * hidden),
    }


# What attention of MPT is computed with; None is a key that must be absent or null.
_MPT_ATTENTION = {
    "alibi": (True,), "attn_type": ("multihead_attention",), "clip_qkv": (None,), "qk_ln": (False,),
    "prefix_lm": (False,), "softmax_scale": (None,), "kv_n_heads": (None,), "attn_uses_sequence_id": (False,),
}  # fmt: skip


def _alibi_keys(fields: Fields, family: Family) -> dict[str, Any]:
    """Return the sizes that files of BLOOM and MPT leave out, and ALiBi's exponent. Raises ModelError."""
    sizes = {"num_key_value_heads": fields.values.get("num_attention_heads")}
    sizes["intermediate_size"] = 4 * fields.integer("hidden_size")
    return sizes | (_mpt_keys(fields) if "attn_config" in family.defaults else {})


def _mpt_keys(fields: Fields) -> dict[str, Any]:
    """Check the switches of MPT's attention, and return ALiBi's exponent, which is among them. Raises ModelError."""
    own = Fields(fields.mapping("attn_config"), f"{fields.where}: attn_config")
    for key, allowed in _MPT_ATTENTION.items():
        if own.values.get(key, allowed[0]) not in allowed:
            raise own.wrong(key, "left out" if allowed == (None,) else str(allowed[0]).lower())
    if fields.integer("expansion_ratio", default=4) != 4:
        raise fields.wrong("expansion_ratio", "4")
    return {} if fields.has("alibi_bias_max") else {"alibi_bias_max": own.positive("alibi_bias_max", default=8.0)}


def _zamba_keys(fields: Fields) -> dict[str, Any]:
    """Return the kinds of layers, the dimensions of a head, whose input is twice as wide, and the size of the MLP."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if 2 * hidden % heads:
        raise fields.wrong("num_attention_heads", f"a divisor of 2 * hidden_size = {2 * hidden}")
    if fields.values.get("head_dim") not in (None, 2 * hidden // heads):
        raise fields.wrong("attention_head_dim", f"2 * hidden_size / num_attention_heads = {2 * hidden // heads}")
    kinds = fields.values.get("layers_block_type") or fields.values.get("layer_types")
    return {
        "layers_block_type": kinds or _ZAMBA_LAYERS,
        "head_dim": 2 * hidden // heads,
        "intermediate_size": fields.integer("intermediate_size", default=4 * hidden),
        "position_embedding_type": "rope" if fields.flag("use_mem_rope") else "nope",
    }


def _gpt_keys(fields: Fields) -> dict[str, Any]:
    """Return the number of KV heads, and the size of the MLP, by default four times the hidden size."""
    size = fields.integer("intermediate_size", default=4 * fields.integer("hidden_size"))
    heads = 1 if fields.flag("multi_query") else fields.integer("num_attention_heads")
    return {"intermediate_size": size, "num_key_value_heads": heads}


def _phi_keys(fields: Fields) -> dict[str, Any]:
    """Return the part of a head that is rotated, and the size of the MLP, by default four times the hidden size."""
    hidden = fields.integer("hidden_size")
    rotated = Fraction(fields.integer("rotary_dim") * fields.integer("num_attention_heads"), hidden)
    return {
        "partial_rotary_factor": rotated,
        "intermediate_size": fields.integer("intermediate_size", default=4 * hidden),
    }


def _kimi_keys(fields: Fields) -> dict[str, Any]:
    """Return sizes and kinds of layers, which published files put in a separate object that counts layers from 1."""
    nested = fields.mapping("linear_attn_config")
    renamed = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    renamed["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    usual = {new: nested[old] for old, new in renamed.items() if nested.get(old) is not None}
    if fields.has("layer_types"):
        return usual
    count, where = fields.integer("num_hidden_layers", high=MAX_PERIOD), f"{fields.where}: linear_attn_config"
    listed = [nested.get(key) for key in ("full_attn_layers", "kda_layers")]
    full, delta = (each if isinstance(each, list) else [] for each in listed)
    if any(type(each) is not int for each in (*full, *delta)) or sorted([*full, *delta]) != list(range(1, count + 1)):
        raise Fields(nested, where).wrong(
            "full_attn_layers", f"a list that, together with kda_layers, names each layer from 1 to {count} once"
        )
    kinds = ["full_attention" if index + 1 in full else "linear_attention" for index in range(count)]
    return {**usual, "layer_types": kinds}


def _ling_keys(fields: Fields) -> dict[str, Any]:
    """Return sizes of Ling 3's delta attention, which published files share with attention, and the kinds of layers."""
    usual = {
        "linear_head_dim": "head_dim",
        "linear_num_heads": "num_attention_heads",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }
    found: dict[str, Any] = {new: fields.values.get(old) for new, old in usual.items() if not fields.has(new)}
    if not fields.has("layer_types"):
        count = fields.integer("num_hidden_layers", high=MAX_PERIOD)
        size = fields.integer("layer_group_size", high=count)
        kinds = ["linear_attention" if (index + 1) % size else "full_attention" for index in range(count)]
        found["layer_types"] = kinds
    return found


def _separate_keys(fields: Fields) -> dict[str, Any]:
    """Return the sizes of OLMo Hybrid's delta nets, which follow from those of attention if a config lacks them."""
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    key_heads = fields.integer("linear_num_key_heads", default=heads)
    key_dim = fields.integer("linear_key_head_dim", default=max(1, int(0.75 * hidden / key_heads)))
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": fields.integer("linear_num_value_heads", default=heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": fields.integer("linear_value_head_dim", default=2 * key_dim),
    }


def _lfm3_keys(fields: Fields) -> dict[str, Any]:
    """Return the kinds of layers, which follow from their number if a config lists none."""
    if fields.has("layer_types"):
        return {}
    kinds = {2: "full_attention", 0: "sliding_attention"}
    count = fields.integer("num_hidden_layers", high=MAX_PERIOD)
    return {"layer_types": [kinds.get(index % 4, "conv") if index else "conv" for index in range(count)]}


def _lfm2_keys(fields: Fields) -> dict[str, Any]:
    """Return the MLP's size, and whether the head is tied."""
    renamed = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
    usual = {new: fields.values[old] for old, new in renamed.items() if fields.has(old)}
    if fields.flag("block_auto_adjust_ff_dim"):
        sizes = Fields({**fields.values, **usual}, fields.where)
        size = int(2 * sizes.integer("intermediate_size") / 3)
        if fields.has("block_ffn_dim_multiplier"):
            multiple = fields.integer("block_multiple_of")
            size = -(-int(fields.positive("block_ffn_dim_multiplier") * size) // multiple) * multiple
        usual["intermediate_size"] = size
    return usual
