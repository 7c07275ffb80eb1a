"""Read the mixtures of experts of a config, layer by layer."""

from __future__ import annotations

import math
from dataclasses import replace

from ..errors import quoted
from .config_fields import Fields
from .families.mixture import ClampedGate, Mixture, MixtureFamily, Scores

MOST_EXPERTS = 1 << 12
EXPERT_LIMITS, MLP_LIMITS = "swiglu_limits", "swiglu_limits_shared"
_MLP_TYPES = ("dense", "sparse")
# The key of the experts' activation, and the names that it may have.
_ACTIVATIONS = {
    "silu": ("hidden_act", "silu", "swish"),
    "gelu_tanh": ("hidden_activation", "gelu_pytorch_tanh"),
    "relu2": ("hidden_act", "relu2"),
}


def read_mixtures(fields: Fields, family: MixtureFamily | None, num_layers: int) -> tuple[Mixture | None, ...]:
    """Return the mixture of each layer, None for an ordinary MLP.

    Raises:
        ModelError: a value is invalid, or requests a feature that is not computed.
    """
    if family is None or is_dense(fields, family):
        return (None,) * num_layers
    mixture = _mixture(fields, family)
    is_sparse = _sparse_layers(fields, family, num_layers)
    if not family.limited:
        return tuple(mixture if each else None for each in is_sparse)
    bounds = zip(
        read_bounds(fields, EXPERT_LIMITS, num_layers), read_bounds(fields, MLP_LIMITS, num_layers), strict=True
    )
    return tuple(
        replace(mixture, clamp=clamp, shared_clamp=shared) if each else None
        for each, (clamp, shared) in zip(is_sparse, bounds, strict=True)
    )


def read_bounds(fields: Fields, key: str, count: int) -> list[ClampedGate | None]:
    """Return the bounded activation of each of ``count`` layers (Step 3.5), None for SiLU without bounds.

    The published code bounds the result of SiLU, ``min(silu(g), limit)``. SiLU rises wherever it is above 0, so this is
    SiLU of a gate with another bound.

    Raises:
        ModelError: the value is no list of a number from 0 on, or null, for each layer.
    """
    listed = fields.values.get(key)
    if listed is None:
        return [None] * count
    is_number = isinstance(listed, list) and all(each is None or type(each) in (int, float) for each in listed)
    if not is_number or len(listed) != count or not all(each is None or 0 <= each < math.inf for each in listed):
        raise fields.wrong(key, f"a list of {count} numbers from 0 on")
    return [ClampedGate(1.0, float(each), 0.0, _gate_of(float(each))) if each else None for each in listed]


def _gate_of(result: float) -> float:
    """Return the gate whose SiLU is ``result``, above 0, by bisection."""
    low, high = 0.0, result + 1.0  # SiLU is above g - 1
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if middle / (1 + math.exp(-middle)) < result else (low, middle)
    return high


def is_dense(fields: Fields, family: MixtureFamily) -> bool:
    """Return whether a config of a family whose mixtures are optional has no experts."""
    if family.flag_key is not None and not fields.flag(family.flag_key):
        return True
    if not family.optional and not family.single_is_dense:
        return False
    most = max(fields.integer(key, low=0, high=MOST_EXPERTS, default=0) for key in family.count_keys)
    return most <= 1 if family.single_is_dense else most == 0


def _mixture(fields: Fields, family: MixtureFamily) -> Mixture:
    named = [key for key in family.count_keys if fields.has(key)]
    counts = [fields.integer(key, high=MOST_EXPERTS) for key in named or family.count_keys[:1]]
    if len(set(counts)) > 1:
        raise fields.wrong(named[1], f"the same as {named[0]}, {counts[0]}")
    count = counts[0]
    key, *activations = _ACTIVATIONS[family.activation if family.gated else "relu2"]
    if fields.values.get(key, "silu") not in activations:
        raise fields.wrong(key, f"one of {', '.join(activations)} in experts")
    if fields.has("scoring_func") and fields.values["scoring_func"] != family.scores:
        raise fields.wrong("scoring_func", quoted(family.scores))
    scores = _scores(fields, family)
    groups, top_groups = _groups(fields, family, count)
    allowed = count * top_groups // groups
    shared = fields.integer(family.shared_size_key, low=0) if family.shared_size_key else 0
    if family.shared_count_key:
        shared *= fields.integer(family.shared_count_key, low=0, high=MOST_EXPERTS)
    top_k = _of_all_layers(fields, family.top_k_key).integer(family.top_k_key, high=allowed)
    renormalises = fields.flag("norm_topk_prob") if family.renormalises is None else family.renormalises
    if family.scores_key is not None and scores == "softmax":
        renormalises = True
    share = _share(fields, family) if shared else 1.0
    clamp = read_clamp(fields) if family.clamped else None
    scale = fields.positive("routed_scaling_factor", default=1.0) if family.scaled else 1.0
    return Mixture(
        names=family.names,
        num_experts=count,
        size=fields.integer(family.size_key),
        top_k=top_k,
        scores=scores,
        renormalises=renormalises and not (family.single_keeps_score and top_k == 1),
        scale=scale * share,
        corrected=family.corrected and (family.corrected_key is None or fields.flag(family.corrected_key)),
        groups=groups,
        top_groups=top_groups,
        best_of_group=2 if groups > 1 and family.corrected else 1,
        shared_size=shared,
        gated_sharing=family.gated_sharing,
        biased=family.biased,
        clamp=clamp,
        shared_clamp=clamp,
        weighs_input=family.weighs_input,
        gated=family.gated,
        is_beside_mlp=family.beside_mlp,
        activation=family.activation,
        latent_size=fields.integer(family.latent_key) if family.latent_key and fields.has(family.latent_key) else None,
        shared_scale=share,
    )


def _scores(fields: Fields, family: MixtureFamily) -> Scores:
    """Return the score function, which some families' configs name."""
    if family.scores_key is None or not fields.has(family.scores_key):
        return family.scores
    match fields.values[family.scores_key]:
        case "softmax":
            return "softmax"
        case "sigmoid":
            return "sigmoid"
    raise fields.wrong(family.scores_key, "softmax or sigmoid")


def _share(fields: Fields, family: MixtureFamily) -> float:
    """Return the factor of the chosen experts' result and of the shared one's: 0.5 if they are averaged."""
    if family.sharing_key is None:
        return 1.0
    how = fields.values.get(family.sharing_key)
    if how not in ("sum", "average"):
        raise fields.wrong(family.sharing_key, "sum or average")
    return 0.5 if how == "average" else 1.0


def _of_all_layers(fields: Fields, key: str) -> Fields:
    """Return the fields with one value of a key in place of a list of equal values. Raises ModelError."""
    listed = fields.values.get(key)
    if not isinstance(listed, list):
        return fields
    if not listed or any(value != listed[0] for value in listed):
        raise fields.wrong(key, "the same in all layers")
    return Fields({**fields.values, key: listed[0]}, fields.where)


def read_clamp(fields: Fields) -> ClampedGate:
    """Return the bound and the factor of a clamped gate. Raises ModelError."""
    return ClampedGate(fields.positive("swiglu_alpha", default=1.702), fields.positive("swiglu_limit", default=7.0))


def _groups(fields: Fields, family: MixtureFamily, count: int) -> tuple[int, int]:
    """Return the number of groups, and the number of groups from which a token may choose."""
    method = fields.values.get("topk_method") or next(iter(family.methods), None)
    if family.methods and method not in family.methods:
        raise fields.wrong("topk_method", f"one of {', '.join(family.methods)}")
    if not family.grouped or method == "greedy":
        return 1, 1
    groups = fields.integer("n_group", high=count, default=1)
    if count % groups or (groups > 1 and count // groups < 2):
        raise fields.wrong("n_group", f"a number that divides the {count} experts into equal groups of at least two")
    return groups, fields.integer("topk_group", high=groups, default=1)


def _sparse_layers(fields: Fields, family: MixtureFamily, num_layers: int) -> list[bool]:
    """Return for each layer whether its MLP is a mixture."""
    if family.flags_key is not None and isinstance(fields.values.get(family.flags_key), list):
        return _flagged_layers(fields, family.flags_key, num_layers)
    match family.dense_layers:
        case "none":
            return [True] * num_layers
        case "typed" if fields.has("mlp_layer_types"):
            return _typed_layers(fields, num_layers)
        case "spanned":
            return _spanned_layers(fields, num_layers)
        case "first" | "typed":
            first = fields.integer(family.first_key, low=0, high=num_layers)
            return [index >= first for index in range(num_layers)]
        case "periodic":
            period = fields.integer("expert_layer_period", high=MOST_EXPERTS)
            offset = fields.integer("expert_layer_offset", low=0, high=period - 1)
            return [index % period == offset for index in range(num_layers)]
        case "unlisted":
            return _listed_layers(fields, num_layers)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise fields.wrong("mlp_only_layers", "a list of layers")
    step = fields.integer("decoder_sparse_step", default=1)
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]


def _typed_layers(fields: Fields, num_layers: int) -> list[bool]:
    listed = fields.values["mlp_layer_types"]
    if not isinstance(listed, list) or len(listed) != num_layers or any(kind not in _MLP_TYPES for kind in listed):
        raise fields.wrong("mlp_layer_types", f"a list of {num_layers} entries, each {' or '.join(_MLP_TYPES)}")
    return [kind == _MLP_TYPES[1] for kind in listed]


def _flagged_layers(fields: Fields, key: str, num_layers: int) -> list[bool]:
    listed = fields.values[key]
    if len(listed) != num_layers or any(type(each) is not int or each not in (0, 1) for each in listed):
        raise fields.wrong(key, f"a list of {num_layers} ones and zeros")
    found = [each == 1 for each in listed]
    if fields.has("mlp_layer_types") and _typed_layers(fields, num_layers) != found:
        raise fields.wrong(key, "a list with 1 for the layers that mlp_layer_types calls sparse")
    return found


def _spanned_layers(fields: Fields, num_layers: int) -> list[bool]:
    first, last = (fields.integer(f"moe_layer_{key}_index", low=-1, high=num_layers) for key in ("start", "end"))
    step = fields.integer("moe_layer_interval", high=num_layers)
    last = num_layers - 1 if last == -1 else last
    return [(index + 1) % step == 0 and first <= index <= last for index in range(num_layers)]


def _listed_layers(fields: Fields, num_layers: int) -> list[bool]:
    listed = fields.values.get("moe_layers")
    if listed is None:
        step = fields.integer("interleave_moe_layer_step")
        return [(index + 1) % step == 0 for index in range(num_layers)]
    if not isinstance(listed, list) or any(type(index) is not int for index in listed):
        raise fields.wrong("moe_layers", "a list of layers")
    return [index in listed for index in range(num_layers)]
