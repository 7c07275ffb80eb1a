"""Read the layers of a config that have a recurrent state in place of attention, and LFM2's own keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_fields import Fields
from .families.family import Family
from .families.recurrent import RecurrentLayer, ShortConvLayer

ATTENTION, CONV = "full_attention", "conv"
_MOST_TAPS = 8


def read_recurrent(fields: Fields, family: Family, count: int) -> tuple[RecurrentLayer | None, ...]:
    """Return what each layer has in place of attention, None for attention.

    Raises:
        ModelError: a value is invalid, or no layer has attention.
    """
    if not family.short_conv:
        return (None,) * count
    conv = ShortConvLayer(fields.integer("conv_L_cache", low=2, high=_MOST_TAPS), fields.flag("conv_bias"))
    return tuple(conv if kind == CONV else None for kind in _kinds(fields, count))


def _kinds(fields: Fields, count: int) -> list[str]:
    """Return ``full_attention`` or ``conv`` for each layer, also from the older "full_attn_idxs"."""
    listed = fields.values.get("layer_types")
    if listed is None:
        indices = fields.values.get("full_attn_idxs")
        indices = list(range(count)) if indices is None else indices
        if not isinstance(indices, list) or any(type(each) is not int or not 0 <= each < count for each in indices):
            raise fields.wrong("full_attn_idxs", f"a list of layers below {count}")
        listed = [ATTENTION if index in indices else CONV for index in range(count)]
    if not isinstance(listed, list) or len(listed) != count or any(kind not in (ATTENTION, CONV) for kind in listed):
        raise fields.wrong("layer_types", f"a list of {count} times {ATTENTION} or {CONV}")
    if ATTENTION not in listed:
        raise fields.wrong("layer_types", f"a list with {ATTENTION} at least once")
    return listed


def own_keys(config: Mapping[str, Any], family: Family, where: str) -> Mapping[str, Any]:
    """Return a config with the usual keys in place of LFM2's own: the MLP's size, the tied head. Raises ModelError."""
    if not family.short_conv:
        return config
    fields = Fields({**family.defaults, **config}, where)
    renamed = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
    usual = {new: config[old] for old, new in renamed.items() if fields.has(old)}
    if fields.flag("block_auto_adjust_ff_dim"):
        sizes = Fields({**fields.values, **usual}, where)
        size = int(2 * sizes.integer("intermediate_size") / 3)
        if fields.has("block_ffn_dim_multiplier"):
            multiple = fields.integer("block_multiple_of")
            size = -(-int(fields.positive("block_ffn_dim_multiplier") * size) // multiple) * multiple
        usual["intermediate_size"] = size
    return {**config, **usual}
