"""Read from a GGUF file the layers of several sizes (Gemma 4), as keys of a ``config.json``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ModelError
from .config_fields import Fields
from .gguf import GgufFile

READ_WITH_SIZED_LAYERS = frozenset(
    {
        *("attention.key_length_swa", "attention.value_length_swa", "attention.shared_kv_layers"),
        *("embedding_length_per_layer_input", "rope.dimension_count_swa"),
    }
)
"""Keys below the architecture's name that are read here, beside those of other families."""
_PATTERN = "attention.sliding_window_pattern"
_EMBEDDING = "per_layer_token_embd.weight"
_MOST = 1 << 16
_UNTURNED = 1e20  # above this a frequency's divisor leaves its pair as it is


def sized_layers(file: GgufFile, fields: Fields, divisors: tuple[float, ...] | None) -> dict[str, Any]:
    """Return the keys for heads, MLPs, shared K and V, inputs of layers and rotary parameters.

    Args:
        fields: the metadata below the architecture's name.
        divisors: divisors of the rotary frequencies in layers with full attention; None if the frequencies are not
            divided.

    Raises:
        ModelError: a value is invalid, or requests a feature that is not computed.
    """
    if fields.integer("expert_count", low=0, default=0):
        raise fields.wrong("expert_count", "0 (experts beside an MLP are supported only in Hugging Face format)")
    count = fields.integer("block_count", high=_MOST)
    is_local = _of_layers(fields, _PATTERN, count)
    full, local = _head_dim(fields, ""), _head_dim(fields, "_swa")
    kv_heads = _of_layers(fields, "attention.head_count_kv", count)
    of_full, of_local = (_same(fields, kv_heads, is_local, kind) for kind in (False, True))
    shared = fields.integer("attention.shared_kv_layers", low=0, high=count, default=0)
    sizes = _of_layers(fields, "feed_forward_length", count)
    is_wide = len(set(sizes)) > 1
    if is_wide and sizes != sizes[:1] * (count - shared) + [2 * sizes[0]] * shared:
        raise fields.wrong(
            "feed_forward_length", "the same in all layers, or twice as much in those that share K and V"
        )
    own = (index for index in range(count - shared) if not is_local[index])
    embedding = file.tensors.get(_EMBEDDING)
    return {
        "head_dim": local,
        "num_key_value_heads": of_local or of_full,
        "per_layer_config": {
            str(index): {"head_dim": full, "num_key_value_heads": of_full}
            for index, kind in enumerate(is_local)
            if not kind
        },
        "attention_k_eq_v": any(f"blk.{index}.attn_v.weight" not in file.tensors for index in own),
        "num_kv_shared_layers": shared,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": is_wide,
        "hidden_size_per_layer_input": fields.integer("embedding_length_per_layer_input", low=0, high=_MOST, default=0),
        "vocab_size_per_layer_input": None if embedding is None else embedding.shape[0],
        "rope_theta": None,
        "rope_local_base_freq": None,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": _full_rope(fields, full, divisors),
            "sliding_attention": {"rope_type": "default", "rope_theta": fields.positive("rope.freq_base_swa")},
        },
    }


def _head_dim(fields: Fields, ending: str) -> int:
    """Return the dimensions of a head, which must all have a rotary embedding. Raises ModelError."""
    dim = fields.integer(f"attention.key_length{ending}", high=_MOST)
    for key in (f"attention.value_length{ending}", f"rope.dimension_count{ending}"):
        if fields.integer(key, high=_MOST, default=dim) != dim:
            raise fields.wrong(key, f"equal to attention.key_length{ending} {dim}")
    return dim


def _of_layers(fields: Fields, key: str, count: int) -> list[int]:
    """Return a number for each layer, from one number for all layers or a list. Raises ModelError."""
    value = fields.values.get(key)
    if not isinstance(value, np.ndarray):
        return [fields.integer(key, low=1, high=1 << 24)] * count
    found = [int(each) for each in value.tolist()]
    if len(found) != count or any(each < 0 for each in found):
        raise fields.wrong(key, f"a number, or a list with one for each of {count} layers")
    return found


def _same(fields: Fields, kv_heads: list[int], is_local: list[int], kind: bool) -> int | None:
    """Return the number of KV heads of the layers of a kind, None without such layers. Raises ModelError."""
    found = {each for each, local in zip(kv_heads, is_local, strict=True) if bool(local) is kind}
    if len(found) > 1 or 0 in found:
        raise fields.wrong(
            "attention.head_count_kv", "the same in all layers with a window, and the same in all layers without one"
        )
    return next(iter(found), None)


def _full_rope(fields: Fields, dim: int, divisors: tuple[float, ...] | None) -> dict[str, Any]:
    """Return the rotary parameters of layers with full attention. Raises ModelError."""
    theta = {"rope_theta": fields.positive("rope.freq_base")}
    if divisors is None:
        return {"rope_type": "default", **theta}
    turned = [each for each in divisors if each < _UNTURNED]
    if len(divisors) != dim // 2 or list(divisors[: len(turned)]) != [1.0] * len(turned):
        raise ModelError(f"The GGUF tensor rope_freqs.weight must be {dim // 2} numbers: first ones, then infinities.")
    # Half a dimension more than the pairs have, so that rounding the quotient cannot lose a pair.
    return {"rope_type": "proportional", "partial_rotary_factor": (2 * len(turned) + 0.5) / dim, **theta}
