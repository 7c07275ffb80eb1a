"""Read the rotary embeddings of a config: ``rope_parameters`` of transformers 5, or the older keys.

new    "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8, ...}, or, where layers with a
       window have their own, {"full_attention": {...}, "sliding_attention": {...}}
old    "rope_theta": 5e5, "rope_scaling": {"rope_type" or "type": ..., "factor": ...}, "rope_local_base_freq": 1e4
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ..errors import ModelError, quoted, shortened
from .config_fields import Fields
from .families.family import Family
from .model_config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QueryScaling,
    Rope,
    YarnScaling,
)

DEFAULT_THETA = 10_000.0

# Supported keys for each type of scaling; other keys would change the angles.
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KEYS = {
    "default": _COMMON | {"original_max_position_embeddings"},
    "linear": _COMMON | {"factor"},
    "llama3": _COMMON | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": _COMMON
    | {"factor", "beta_fast", "beta_slow", "original_max_position_embeddings"}
    | {"attention_factor", "mscale", "mscale_all_dim", "truncate"},
    "dynamic": _COMMON | {"factor", "original_max_position_embeddings"},
    "longrope": _COMMON
    | {"factor", "short_factor", "long_factor", "original_max_position_embeddings", "attention_factor"},
    "proportional": _COMMON | {"factor"},
}
ROPE_TYPES = tuple(_KEYS)
_FROM_ORIGINAL = ("llama3", "yarn", "longrope")  # types that depend on the length before the extension
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_OLD_NAMES = {"su": "longrope"}
_BETA = "llama_4_scaling_beta"
# Keys of a scaling by "alpha". The published code reads the other keys but does not use them.
_NTK_ALPHA = {"alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}


def read_ropes(fields: Fields, family: Family, head_dim: int, full_dim: int) -> tuple[Rope, Rope]:
    """Return the rotary embeddings of layers with full attention and of layers with a window (often the same).

    Args:
        head_dim: dimensions of a head.
        full_dim: dimensions of a head in layers with full attention.

    Raises:
        ModelError: an unsupported type of scaling, or contradictory keys.
    """
    new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    if family.local_theta is None:
        rope = _rope(fields, _merged(new, old, fields.where), "rope_theta", family, head_dim)
        return rope, rope
    if new and not new.keys() <= {"full_attention", "sliding_attention"}:
        raise fields.wrong("rope_parameters", "an object with full_attention and sliding_attention")
    nested = Fields(new, f"{fields.where}: rope_parameters")
    full = _merged(nested.mapping("full_attention"), old, fields.where)
    local = nested.mapping("sliding_attention")
    return (
        _rope(fields, full, "rope_theta", family, full_dim),
        _rope(fields, local, family.local_theta, family, head_dim),
    )


def read_layer_ropes(fields: Fields, rope: Rope, count: int) -> list[Rope | None]:
    """Return the rotary embedding of each layer by "layer_rope_theta", None for a layer with a base of 0.

    Args:
        rope: the rotary embedding of all layers, if there is no such list. Its scaling is that of each layer.

    Raises:
        ModelError: the list has another length, or entries that are not bases.
    """
    key = "layer_rope_theta"
    if not fields.has(key):
        return [rope] * count
    bases = fields.values[key]
    is_number = isinstance(bases, list) and all(type(base) in (int, float) for base in bases)
    if not is_number or len(bases) != count or not all(0 <= base < math.inf for base in bases):
        raise fields.wrong(key, f"a list of {count} numbers of at least 0")
    return [replace(rope, theta=float(base)) if base else None for base in bases]


def read_query_scaling(fields: Fields, family: Family) -> QueryScaling | None:
    """Return the factor of queries by position that the rotary parameters define, or None. Raises ModelError."""
    if not family.scaled_queries:
        return None
    parameters = _merged(fields.mapping("rope_parameters"), fields.mapping("rope_scaling"), fields.where)
    own = Fields(parameters, f"{fields.where}: rope parameters")
    if not own.has(_BETA):
        return None
    beta = own.positive(_BETA)
    return QueryScaling(beta, outer_length(fields, family) or own.integer(_ORIGINAL_LENGTH, high=1 << 30))


def has_null_theta(fields: Fields) -> bool:
    """Return whether the base of the rotary embedding is null, not only absent (OLMo Hybrid has no rotation then)."""
    new = fields.mapping("rope_parameters")
    return "rope_theta" in (found := new if "rope_theta" in new else fields.values) and found["rope_theta"] is None


def _merged(new: dict[str, Any], old: dict[str, Any], where: str) -> dict[str, Any]:
    for key in new.keys() & old.keys():
        if new[key] != old[key]:
            raise ModelError(
                f"{where}: rope_parameters and rope_scaling disagree on {shortened(key)}: {quoted(new[key])} against "
                f"{quoted(old[key])}."
            )
    return {**new, **old}


def _rope(fields: Fields, parameters: dict[str, Any], theta_key: str, family: Family, head_dim: int) -> Rope:
    where = f"{fields.where}: rope parameters"
    if family.mrope:
        parameters = _without_sections(Fields(parameters, where), _rotary_dim(fields, parameters, family, head_dim))
    own = Fields({"rope_theta": fields.values.get(theta_key), **parameters}, where)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    known_kinds = [name for name in _KEYS if name != "proportional" or family.sized_layers or family.proportional]
    if not isinstance(kind, str) or _newest(kind) not in known_kinds or parameters.get("type", kind) != kind:
        raise ModelError(
            f"{fields.where}: rope type {quoted(kind)} is not supported; {', '.join(known_kinds)} are. "
            "It cannot be left out without changing the model's answers."
        )
    kind = _newest(kind)
    known = _KEYS[kind] | _NTK_ALPHA if family.ntk_alpha and kind == "dynamic" else _KEYS[kind]
    if family.scaled_queries:  # The files repeat the length under another key.
        known |= {_BETA, "max_position_embeddings"}
    for key, value in parameters.items():
        if key not in known and value is not None:
            raise ModelError(f"{fields.where}: rope parameter {shortened(key)} is not supported with rope type {kind}.")
    theta = own.positive("rope_theta", default=DEFAULT_THETA)
    if kind == "proportional":
        pairs = int(own.positive("partial_rotary_factor", default=1.0) * head_dim // 2)
        if pairs > head_dim // 2:
            raise own.wrong("partial_rotary_factor", "at most 1")
        return Rope(theta, head_dim, ProportionalScaling(pairs, own.positive("factor", default=1.0)))
    dim = _rotary_dim(fields, parameters, family, head_dim)
    return Rope(
        theta=_dynamic_theta(theta, dim, own) if kind == "dynamic" else theta,
        dim=dim,
        scaling=_scaling(kind, own, fields, family, dim),
        interleaved=family.interleaved,
        rotates_back=family.rotates_back,
    )


def _newest(kind: str) -> str:
    return _OLD_NAMES.get(kind, kind)


def _dynamic_theta(theta: float, dim: int, own: Fields) -> float:
    """Return the base of dynamic NTK scaling for the model's own length: unchanged, or scaled by "alpha" if it is set.

    Beyond the model's length, which no sequence of the engine exceeds, all keys would change with every token.
    """
    if not own.has("alpha"):
        own.positive("factor")
        return theta
    if dim <= 2:
        raise own.wrong("alpha", "absent for heads of two dimensions")
    return float(theta * own.positive("alpha") ** (dim / (dim - 2)))


def _longrope(own: Fields, fields: Fields, original: int, dim: int) -> LongRopeScaling:
    longest = fields.integer("max_position_embeddings", high=1 << 30)
    factor = own.positive("factor", default=longest / original)
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return LongRopeScaling(
        short=own.positives("short_factor", dim // 2),
        long=own.positives("long_factor", dim // 2),
        original_length=original,
        attention_factor=own.positive("attention_factor", default=attention),
    )


def _without_sections(fields: Fields, rotary_dim: int) -> dict[str, Any]:
    """Check and remove the sections for time, height and width: in text the three positions are the same."""
    sections = fields.values.get("mrope_section")
    if sections is not None:
        whole = isinstance(sections, list) and all(type(size) is int and size >= 0 for size in sections)
        if not whole or len(sections) != 3 or sum(sections) != rotary_dim // 2:
            raise fields.wrong(
                "mrope_section", f"three sizes that add up to half of a head's rotated dimensions, {rotary_dim // 2}"
            )
    fields.flag("mrope_interleaved")
    plain = {key: value for key, value in fields.values.items() if not key.startswith("mrope_")}
    for key in ("type", "rope_type"):
        if plain.get(key) == "mrope":
            plain[key] = "default"
    return plain


def _rotary_dim(fields: Fields, parameters: dict[str, Any], family: Family, head_dim: int) -> int:
    factor = parameters.get("partial_rotary_factor", fields.values.get("partial_rotary_factor"))
    if factor is None:
        factor = 1
    if not isinstance(factor, int | float | Fraction) or not 0 < factor <= 1:
        raise ModelError(
            f"{fields.where}: partial_rotary_factor must be a number above 0 and at most 1, not {quoted(factor)}."
        )
    if family.latent and family.partial_rotary and factor != 1:  # a share of the whole query head
        factor *= 1 + fields.integer("qk_nope_head_dim", high=1 << 16) / head_dim
    dim = round(head_dim * factor) if family.latent else int(head_dim * factor)
    if dim % 2 or dim == 0 or (dim != head_dim and (family.latent or not family.partial_rotary)):
        wanted = "an even number" if family.partial_rotary else f"all {head_dim}, an even number,"
        raise ModelError(
            f"{fields.where}: partial_rotary_factor {float(factor)} rotates {dim} of {head_dim} dimensions of a head; "
            f"{wanted} must be rotated in {family.architecture}."
        )
    return dim


def _scaling(
    kind: str, own: Fields, fields: Fields, family: Family, dim: int
) -> LinearScaling | Llama3Scaling | LongRopeScaling | YarnScaling | None:
    if kind == "linear":
        return LinearScaling(own.positive("factor"))
    if kind not in _FROM_ORIGINAL:
        return None
    original = _original_length(own, fields, family)
    if kind == "longrope":
        return _longrope(own, fields, original, dim)
    if kind == "yarn":
        return _yarn(own, original)
    low, high = own.positive("low_freq_factor"), own.positive("high_freq_factor")
    if not low <= high:  # the same for Llama 4: no wavelength lies between
        raise own.wrong("high_freq_factor", f"at least low_freq_factor {low}")
    return Llama3Scaling(own.positive("factor"), low, high, original)


def outer_length(fields: Fields, family: Family) -> int | None:
    """Return the length before the extension that is given beside the rotary parameters; None without it.

    It counts more than the length among the parameters, as in transformers. Families whose layers with a window have
    parameters of their own do not read it. Raises ModelError.
    """
    if family.local_theta is not None or not fields.has(_ORIGINAL_LENGTH):
        return None
    return fields.integer(_ORIGINAL_LENGTH, high=1 << 30)


def _original_length(own: Fields, fields: Fields, family: Family) -> int:
    longest = fields.integer("max_position_embeddings", high=1 << 30)
    return outer_length(fields, family) or own.integer(_ORIGINAL_LENGTH, high=1 << 30, default=longest)


def _yarn(own: Fields, original: int) -> YarnScaling:
    fast, slow = own.positive("beta_fast", default=32.0), own.positive("beta_slow", default=1.0)
    if not slow <= fast:
        raise own.wrong("beta_fast", f"at least beta_slow {slow}")
    if not own.positive("rope_theta", default=DEFAULT_THETA) > 1:
        raise own.wrong("rope_theta", "above 1 with rope type yarn")
    factor = own.positive("factor")
    mscale, mscale_all_dim = own.optional_positive("mscale"), own.optional_positive("mscale_all_dim")
    attention = _yarn_mscale(factor, 1.0)
    if mscale is not None and mscale_all_dim is not None:  # one alone has no effect in the published code
        attention = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return YarnScaling(
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        original_length=original,
        attention_factor=own.positive("attention_factor", default=attention),
        truncate="truncate" not in own.values or own.flag("truncate"),
        score_factor=_yarn_mscale(factor, mscale_all_dim) ** 2 if mscale_all_dim is not None else 1.0,
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
