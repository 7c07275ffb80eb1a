"""Read the index of block-sparse attention, and the keys by which MiniMax M3's files describe layers."""

from __future__ import annotations

from typing import Any

from .config_fields import Fields
from .families.family import Family
from .model_config import BlockIndex

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
NESTED, MIXTURES = "sparse_attention_config", "mlp_layer_flags"
"""The published object of the index, and this project's name of "moe_layer_freq", which is a number elsewhere."""

_MOST = 1 << 20
# Published keys of the index, and those that transformers writes.
_SIZES = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
_FREQUENCY, _NO_VALUES = "sparse_attention_freq", "sparse_disable_index_value"
# Further published keys, each with the only value that is computed.
_ONLY: dict[str, Any] = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}


def block_index_keys(fields: Fields) -> dict[str, Any]:
    """Return the keys that transformers writes for those of a published file. Raises ModelError."""
    count = fields.integer("num_hidden_layers", high=1 << 16)
    found: dict[str, Any] = {}
    nested = Fields(fields.mapping(NESTED), f"{fields.where}: {NESTED}")
    for key, value in nested.values.items():
        if key in _SIZES:
            found[_SIZES[key]] = value
        elif key in _ONLY and value not in (None, _ONLY[key]):
            raise nested.wrong(key, f"{_ONLY[key]!r}, the only supported value".lower())
        elif key not in (*_ONLY, _FREQUENCY, _NO_VALUES):
            raise nested.wrong(
                key, f"absent: the supported keys are {', '.join((*_SIZES, *_ONLY, _FREQUENCY, _NO_VALUES))}"
            )
    is_sparse = _flags(nested, _FREQUENCY, count) if nested.has(_FREQUENCY) else None
    if nested.has(_NO_VALUES) and is_sparse is not None:
        has_none = _flags(nested, _NO_VALUES, count)
        if any(sparse and not none for sparse, none in zip(is_sparse, has_none, strict=True)):
            raise nested.wrong(
                _NO_VALUES, f"1 in each layer where {_FREQUENCY} is 1, because the values of an index are not supported"
            )
    if is_sparse is not None and not fields.has("layer_types"):
        found["layer_types"] = [SPARSE if each else FULL for each in is_sparse]
    if not fields.has("mlp_layer_types"):
        has_mixture = _flags(fields, MIXTURES, count) if fields.has(MIXTURES) else [True] * count
        found["mlp_layer_types"] = ["sparse" if each else "dense" for each in has_mixture]
    if fields.values.get("hidden_act") == "swigluoai":  # what a clamped gate is called
        found["hidden_act"] = "silu"
    return found


def read_block_indices(fields: Fields, family: Family, count: int) -> list[BlockIndex | None]:
    """Return the index of each of ``count`` layers, None for a layer whose tokens see all tokens. Raises ModelError."""
    kinds = fields.values.get("layer_types")
    if not family.block_index or not isinstance(kinds, list) or SPARSE not in kinds:
        return [None] * count
    heads = fields.integer("index_n_heads", high=_MOST)
    if heads != fields.integer("num_key_value_heads", high=_MOST):
        raise fields.wrong("index_n_heads", "num_key_value_heads, because each KV head chooses its own blocks")
    most = fields.integer("index_topk_blocks", high=_MOST)
    found = BlockIndex(
        most=most,
        size=fields.integer("index_block_size", high=_MOST),
        local=fields.integer("index_local_blocks", low=0, high=most),
        dim=fields.integer("index_head_dim", high=1 << 16),
    )
    return [found if kind == SPARSE else None for kind in kinds]


def _flags(fields: Fields, key: str, count: int) -> list[bool]:
    """Return a list of zeros and ones, one for each layer."""
    listed = fields.values[key]
    if not isinstance(listed, list) or len(listed) != count or any(each not in (0, 1) for each in listed):
        raise fields.wrong(key, f"a list of {count} zeros and ones")
    return [bool(each) for each in listed]
