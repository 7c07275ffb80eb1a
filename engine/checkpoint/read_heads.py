"""Read the sizes of attention and MLP that differ between layers, and whose K and V a layer reads (Gemma 4)."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import quoted
from .config_fields import Fields
from .families.family import Family
from .model_config import KvShape, PerLayerInputs

FULL, SLIDING = "full_attention", "sliding_attention"
_MOST = 1 << 16
_LISTED, _GLOBAL_DIM, _GLOBAL_HEADS = "per_layer_config", "global_head_dim", "num_global_key_value_heads"
_OWN_KEYS = ("head_dim", "num_key_value_heads")
_SAME_VALUES, _SHARED = "attention_k_eq_v", "num_kv_shared_layers"


class LayerHeads(NamedTuple):
    """Values of a layer in a model whose layers differ in size: the fields of ``LayerConfig`` with these names."""

    kv_heads: KvShape | None = None
    kv_source: int | None = None
    shares_values: bool = False
    mlp_size: int | None = None
    num_heads: int | None = None


def read_heads(fields: Fields, family: Family, kinds: list[str]) -> tuple[LayerHeads, ...]:
    """Return the values of each layer that differs from the model's; nothing in families with layers of one size.

    Args:
        kinds: kind of each layer; layers with full attention may have other heads.

    Raises:
        ModelError: a value is invalid, or a layer would read K and V of a kind that no earlier layer stores.
    """
    if family.window_kv_heads_key is not None:
        return _by_window(fields, family.window_kv_heads_key, kinds)
    if family.layer_heads_key is not None:
        return _by_layer(fields, family.layer_heads_key, len(kinds))
    if not family.sized_layers:
        return (LayerHeads(),) * len(kinds)
    full = _full_heads(fields, kinds)
    model = KvShape(*(fields.integer(key, high=_MOST) for key in ("num_key_value_heads", "head_dim")))
    sources = _sources(fields, kinds)
    is_wide, size = fields.flag("use_double_wide_mlp"), fields.integer(family.mlp_size_key)
    same = fields.flag(_SAME_VALUES)
    return tuple(
        LayerHeads(
            kv_heads=full if kind == FULL and full != model else None,
            kv_source=source,
            shares_values=same and kind == FULL and source is None,
            mlp_size=2 * size if is_wide and source is not None else None,
        )
        for kind, source in zip(kinds, sources, strict=True)
    )


def _by_window(fields: Fields, key: str, kinds: list[str]) -> tuple[LayerHeads, ...]:
    """Return the KV heads of layers with a window where they have another number (MiMo V2). Raises ModelError."""
    heads = fields.integer("num_attention_heads", high=_MOST)
    model = fields.integer("num_key_value_heads", high=_MOST)
    own = fields.integer(key, high=_MOST, default=2 * model)
    if heads % own:
        raise fields.wrong(key, f"a divisor of num_attention_heads {heads}")
    shape = KvShape(own, fields.integer("head_dim", high=_MOST))
    return tuple(LayerHeads(shape if kind == SLIDING and own != model else None) for kind in kinds)


def _by_layer(fields: Fields, key: str, count: int) -> tuple[LayerHeads, ...]:
    """Return the query heads of layers that a list gives another number of them (Laguna). Raises ModelError."""
    listed = fields.values.get(key)
    if listed is None:
        return (LayerHeads(),) * count
    heads, kv_heads = (fields.integer(name, high=_MOST) for name in ("num_attention_heads", "num_key_value_heads"))
    is_whole = isinstance(listed, list) and all(type(each) is int and 0 < each <= _MOST for each in listed)
    if not is_whole or len(listed) != count or any(each % kv_heads for each in listed):
        raise fields.wrong(key, f"a list of {count} multiples of num_key_value_heads {kv_heads}")
    return tuple(LayerHeads(num_heads=None if each == heads else each) for each in listed)


def full_head_dim(heads: tuple[LayerHeads, ...], head_dim: int) -> int:
    """Return the dimensions of heads in layers with full attention; a size of their own is the same in all of them."""
    return next((own.kv_heads.dim for own in heads if own.kv_heads is not None), head_dim)


def read_layer_inputs(fields: Fields, family: Family) -> PerLayerInputs | None:
    """Return the sizes of the inputs that each layer gets beside the residual stream, None for no such inputs."""
    key = "hidden_size_per_layer_input"
    if not family.layer_inputs or not (size := fields.integer(key, low=0, high=_MOST, default=0)):
        return None
    return PerLayerInputs(size, fields.integer("vocab_size_per_layer_input"))


def _full_heads(fields: Fields, kinds: list[str]) -> KvShape:
    """Return the heads of layers with full attention. Raises ModelError."""
    heads = fields.integer("num_attention_heads", high=_MOST)
    kv_heads, dim = (fields.integer(key, high=_MOST) for key in ("num_key_value_heads", "head_dim"))
    if fields.has(_LISTED):
        own = _listed(fields, kinds)
        shape = KvShape(own.get("num_key_value_heads", kv_heads), own.get("head_dim", dim))
    else:
        is_own = fields.flag(_SAME_VALUES) and fields.has(_GLOBAL_HEADS)
        count = fields.integer(_GLOBAL_HEADS, high=_MOST) if is_own else kv_heads
        shape = KvShape(count, fields.integer(_GLOBAL_DIM, high=_MOST))
    if heads % shape.heads:
        raise fields.wrong(_GLOBAL_HEADS, f"a divisor of num_attention_heads {heads}")
    return shape


def _listed(fields: Fields, kinds: list[str]) -> dict[str, int]:
    """Return the sizes of layers with full attention, as newer files list them layer by layer. Raises ModelError."""
    listed = fields.mapping(_LISTED)
    full = {index for index, kind in enumerate(kinds) if kind == FULL}
    if not listed:
        return {}
    own = [Fields(each, f"{fields.where}: {_LISTED}") for each in listed.values() if isinstance(each, dict)]
    is_named = all(key.isdecimal() for key in listed) and {int(key) for key in listed} == full
    if not is_named or len(own) != len(listed) or any(each.values != own[0].values for each in own):
        raise fields.wrong(_LISTED, f"an object with one equal entry for each layer of type {FULL}")
    if other := next((name for name in own[0].values if name not in _OWN_KEYS), None):
        raise own[0].wrong(other, f"absent: only {' and '.join(_OWN_KEYS)} may differ between layers")
    return {name: own[0].integer(name, high=_MOST) for name in own[0].values}


def _sources(fields: Fields, kinds: list[str]) -> list[int | None]:
    """Return the layer whose K and V each layer reads, None for its own: the last layer of its kind that stores KV."""
    shared = fields.integer(_SHARED, low=0, high=len(kinds), default=0)
    first = len(kinds) - shared
    last: dict[str, int] = {kind: index for index, kind in enumerate(kinds[:first])}
    if missing := set(kinds[first:]) - last.keys():
        raise fields.wrong(_SHARED, f"few enough that an earlier layer has type {quoted(min(missing))}")
    return [None if index < first else last[kind] for index, kind in enumerate(kinds)]
