"""Read from a GGUF file what lists of it say of each layer: heads, windows, mixtures, bounds (Laguna, Step 3.5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from ..errors import ModelError
from .config_fields import Fields
from .families.family import Family
from .gguf import GgufFile
from .read_mixture import EXPERT_LIMITS, MLP_LIMITS

FULL, SLIDING = "full_attention", "sliding_attention"
_HEADS, _KV_HEADS, _GATE = "attention.head_count", "attention.head_count_kv", "attn_gate"
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_DIM, _WINDOW_DIM = "rope.dimension_count", "rope.dimension_count_swa"
_THETA, _WINDOW_THETA = "rope.freq_base", "rope.freq_base_swa"
_FACTOR, _PREDICTING, _EVERY = "rope.scaling.yarn_attn_factor", "nextn_predict_layers", "moe_every_n_layers"
_SHARED = "expert_shared_count"
_BOUNDS = {"swiglu_clamp_exp": EXPERT_LIMITS, "swiglu_clamp_shexp": MLP_LIMITS}
READ_WITH_LISTS = frozenset({_WINDOW_DIM, _PREDICTING, _EVERY, _FACTOR, "leading_dense_block_count", _SHARED, *_BOUNDS})
"""Keys below the architecture's name that are read here, beside those of other families."""
_PERIODS = {"laguna": 4}
"""Periods of layers with full attention, the first of which is the very first, in files without a pattern."""
_HALVED = frozenset({"step35"})
"""Architectures whose layers with full attention rotate half of the dimensions that the file names."""
_MOST = 1 << 16
_DEFAULT_THETA = 10_000.0


def listed_layers(file: GgufFile, fields: Fields, family: Family, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a ``config.json`` for heads, windows, mixtures, bounds, gates and rotary parameters.

    Which layers have experts follows from the tensors, and so does the width of the gate of attention's results.

    Args:
        fields: the metadata below the architecture's name.
        scaling: the scaling of the rotary embedding in layers with full attention, as in ``rope_scaling``.

    Raises:
        ModelError: a value is invalid, or requests a feature that is not computed.
    """
    behind = fields.integer(_PREDICTING, low=0, high=64, default=0)
    count = fields.integer("block_count", low=behind + 1, high=_MOST) - behind
    heads, kv_heads = _numbers(fields, _HEADS, count), set(_numbers(fields, _KV_HEADS, count))
    if len(kv_heads) > 1 or (family.layer_heads_key is None and len(set(heads)) > 1):
        raise fields.wrong(_KV_HEADS if len(kv_heads) > 1 else _HEADS, "the same in all layers")
    dim = fields.integer("attention.key_length", high=_MOST)
    if fields.integer("attention.value_length", high=_MOST, default=dim) != dim:
        raise fields.wrong("attention.value_length", f"equal to attention.key_length {dim}")
    counted = family.mixture is not None and family.mixture.shared_count_key is not None
    if fields.integer(_EVERY, default=1) != 1 or (not counted and fields.integer(_SHARED, default=1) != 1):
        raise fields.wrong(_EVERY, "1, with one shared expert")
    window = fields.integer(_WINDOW, low=0, high=1 << 30, default=0)
    kinds = _kinds(fields, family, count) if window else [FULL] * count
    sparse = [f"blk.{index}.ffn_gate_inp.weight" in file.tensors for index in range(count)]
    found: dict[str, Any] = {
        "num_hidden_layers": count,
        "num_attention_heads": heads[0],
        "num_key_value_heads": kv_heads.pop(),
        "head_dim": dim,
        "query_pre_attn_scalar": dim if family.query_scalar else None,
        "layer_types": kinds,
        "sliding_window": window or None,
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "rope_theta": None,
        "rope_local_base_freq": None,
        "rope_scaling": None,
        "rope_parameters": _ropes(fields, family, dim, scaling),
    }
    if family.layer_heads_key is not None:
        found[family.layer_heads_key] = heads
    found |= {new: _bounds(fields, old, count) for old, new in _BOUNDS.items() if fields.has(old)}
    if family.gating_key is not None:
        found[family.gating_key] = _gating(file, heads, dim)
    return found


def _numbers(fields: Fields, key: str, count: int) -> list[int]:
    """Return a number for each layer, from one for all of them or a list, which may name MTP modules too."""
    value = fields.values.get(key)
    if not isinstance(value, np.ndarray):
        return [fields.integer(key, high=_MOST)] * count
    found = [int(each) for each in value.tolist()]
    if len(found) < count or not all(0 < each <= _MOST for each in found):
        raise fields.wrong(key, f"a number above 0, or a list with one for each of {count} layers")
    return found[:count]


def _kinds(fields: Fields, family: Family, count: int) -> list[str]:
    """Return the kind of each layer: as the file lists them, or all but every n-th one with a window."""
    flags = fields.values.get(_PATTERN)
    period = _PERIODS.get(family.gguf_name or "")
    if flags is None and period is not None:
        return [SLIDING if index % period else FULL for index in range(count)]
    if not isinstance(flags, np.ndarray) or len(flags) < count:
        raise fields.wrong(_PATTERN, f"a list with a flag for each of {count} layers")
    return [SLIDING if flag else FULL for flag in flags[:count].tolist()]


def _ropes(fields: Fields, family: Family, dim: int, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of layers with full attention and of those with a window, or those of both."""
    turned = fields.integer(_DIM, high=dim, default=dim)
    theta = fields.positive(_THETA, default=_DEFAULT_THETA)
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": theta, **scaling}
    if full["rope_type"] == "yarn" and fields.has(_FACTOR):  # the model's own, as its config.json has it
        full["attention_factor"] = fields.positive(_FACTOR)
    elif fields.positive(_FACTOR, default=1.0) != 1.0:
        raise fields.wrong(_FACTOR, "1.0 without YaRN")
    if family.local_theta is None:
        return full | {"partial_rotary_factor": Fraction(turned, dim)}
    halves = 2 if family.gguf_name in _HALVED else 1
    return {
        FULL: full | {"partial_rotary_factor": Fraction(turned // halves, dim)},
        SLIDING: {
            "rope_type": "default",
            "rope_theta": fields.positive(_WINDOW_THETA, default=theta),
            "partial_rotary_factor": Fraction(fields.integer(_WINDOW_DIM, high=dim, default=turned), dim),
        },
    }


def _bounds(fields: Fields, key: str, count: int) -> list[float]:
    value = fields.values[key]
    found = [float(each) for each in value.tolist()] if isinstance(value, np.ndarray) else [math.nan]
    if len(found) < count or not all(0 <= each < math.inf for each in found):
        raise fields.wrong(key, f"a list with a number from 0 on for each of {count} layers")
    return found[:count]


def _gating(file: GgufFile, heads: list[int], dim: int) -> str:
    """Return whether the gate has a column for each head or for each of its dimensions, the same in all layers."""
    for width, name in ((1, "per-head"), (dim, "per-element")):
        gates = (file.tensors.get(f"blk.{index}.{_GATE}.weight") for index in range(len(heads)))
        if all(gate is not None and gate.shape[0] == width * own for gate, own in zip(gates, heads, strict=True)):
            return name
    raise ModelError(f"The GGUF tensors blk.N.{_GATE}.weight must have a row for each head, or for each dimension.")
