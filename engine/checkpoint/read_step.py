"""Read the keys by which Step 3.5 and 3.7 describe layers: published files list more layers than the model has."""

from __future__ import annotations

import math
from typing import Any

from .config_fields import Fields
from .families.prediction import COUNT_KEY
from .read_mixture import EXPERT_LIMITS, MLP_LIMITS

FULL, SLIDING = "full_attention", "sliding_attention"
_HEADS, _LAYER_HEADS = "num_attention_heads", "num_attention_heads_per_layer"
_SLIDING_HEADS, _OTHER, _LISTED = "num_sliding_attention_heads", "attention_other_setting", "per_layer_config"
_MLPS, _MIXTURES = "mlp_layer_types", "moe_layers_enum"
_THETA, _FACTORS, _ROPES, _SCALED = "rope_theta", "partial_rotary_factors", "rope_parameters", "yarn_only_types"
_ROTATED = "use_rope_layers"
_FIRST_MIXTURE = 3
_DEFAULT_THETA = 10_000.0
_MOST = 1 << 16


def step_keys(fields: Fields) -> dict[str, Any]:
    """Return the usual keys for a published file's, or for those that transformers writes. Raises ModelError."""
    count = fields.integer("num_hidden_layers", high=_MOST)
    kinds = _trimmed(fields, "layer_types", count) or [FULL] * count
    found: dict[str, Any] = {"layer_types": kinds, "partial_rotary_factor": None}
    for key in (EXPERT_LIMITS, MLP_LIMITS):
        found[key] = _trimmed(fields, key, count)
    found[_MLPS] = _trimmed(fields, _MLPS, count) or _mlps(fields, count)
    if not fields.has(_LAYER_HEADS):  # as read from GGUF files
        found[_LAYER_HEADS] = _layer_heads(fields, kinds)
    if not fields.has("query_pre_attn_scalar") and fields.has("head_dim"):
        found["query_pre_attn_scalar"] = fields.integer("head_dim", high=_MOST)
    rotates = fields.values.get(_ROTATED)
    if rotates and (not isinstance(rotates, list) or not all(each is True or each == 1 for each in rotates)):
        raise fields.wrong(_ROTATED, "true for all layers, for layers without a rotary embedding are not computed")
    if fields.has(_SCALED) and fields.values[_SCALED] != [FULL]:
        raise fields.wrong(_SCALED, f'["{FULL}"], for a scaling of other layers\' rotary embedding is not computed')
    if not fields.has(_ROPES):
        found |= {_ROPES: _ropes(fields, kinds), _THETA: None}
    return found


def _trimmed(fields: Fields, key: str, count: int) -> list[Any] | None:
    """Return a list with an entry for each layer without its entries for MTP modules; None without the key."""
    listed = fields.values.get(key)
    if listed is None:
        return None
    modules = fields.integer(COUNT_KEY, low=0, high=64, default=0)
    if not isinstance(listed, list) or len(listed) not in (count, count + modules):
        raise fields.wrong(key, f"a list with an entry for each of {count} layers")
    return listed[:count]


def _mlps(fields: Fields, count: int) -> list[str]:
    """Return the kinds of MLPs by the list of layers with experts, which is all but the first three by default."""
    listed = fields.values.get(_MIXTURES)
    if listed is None:
        sparse = set(range(_FIRST_MIXTURE, count))
    else:
        items = [each for each in listed.split(",") if each.strip()] if isinstance(listed, str) else listed
        if not isinstance(items, list) or not all(str(each).strip().isdecimal() for each in items):
            raise fields.wrong(_MIXTURES, "numbers of layers, with commas between them")
        sparse = {int(each) for each in items}
    return ["sparse" if index in sparse else "dense" for index in range(count)]


def _layer_heads(fields: Fields, kinds: list[Any]) -> list[int]:
    """Return the number of query heads of each layer."""
    heads = fields.integer(_HEADS, high=_MOST)
    if fields.has(_LISTED):
        return _listed_heads(fields, heads, len(kinds))
    own = fields.integer(_SLIDING_HEADS, high=_MOST, default=heads)
    if not fields.has(_SLIDING_HEADS) and fields.has(_OTHER):
        other = Fields(fields.mapping(_OTHER), f"{fields.where}: {_OTHER}")
        own = other.integer(_HEADS, high=_MOST, default=heads)
        for key, usual in (("num_attention_groups", "num_key_value_heads"), ("head_dim", "head_dim")):
            if other.has(key) and other.values[key] != fields.values.get(usual):
                raise other.wrong(key, f"{usual} of the other layers, {fields.values.get(usual)}")
    return [own if kind == SLIDING else heads for kind in kinds]


def _listed_heads(fields: Fields, heads: int, count: int) -> list[int]:
    listed = fields.mapping(_LISTED)
    found = [heads] * count
    for key, values in listed.items():
        if not key.isdecimal() or int(key) >= count or not isinstance(values, dict) or values.keys() - {_HEADS}:
            raise fields.wrong(_LISTED, f"an object with {_HEADS} for some of {count} layers")
        found[int(key)] = Fields(values, f"{fields.where}: {_LISTED}").integer(_HEADS, high=_MOST, default=heads)
    return found


def _ropes(fields: Fields, kinds: list[Any]) -> dict[str, dict[str, Any]]:
    """Return the rotary parameters of each kind of layers, which published files list by layer."""
    thetas = _by_layer(fields, _THETA, _DEFAULT_THETA, len(kinds))
    factors = _by_layer(fields, _FACTORS, 1.0, len(kinds))
    found: dict[str, dict[str, Any]] = {}
    for kind, theta, factor in zip(kinds, thetas, factors, strict=True):
        own = {_THETA: theta, "partial_rotary_factor": factor}
        if found.setdefault(kind, own) != own:
            raise fields.wrong(_THETA, f"the same, with {_FACTORS}, in all layers with {kind}")
    return found


def _by_layer(fields: Fields, key: str, default: float, count: int) -> list[Any]:
    value = fields.values.get(key)
    listed = _trimmed(fields, key, count) if isinstance(value, list) else [default if value is None else value] * count
    if not listed or not all(type(each) in (int, float) and 0 < each < math.inf for each in listed):
        raise fields.wrong(key, f"a number above 0 for each of {count} layers")
    return listed
