"""Parser of PEFT's ``adapter_config.json`` (0.21). It refuses options that are not computed exactly.

Every field of PEFT's ``LoraConfig`` is in one of the tables below. Fields without effect on the forward pass of a
trained adapter are ignored, and supported fields are read. Any other field, including unknown keys, must have a value
that means "not used".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .errors import AdapterError
from .rank_patterns import NamePattern

MOST_BYTES = 1 << 20
_MOST_ALPHA = 1e6
_TASKS = ("CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION", "SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
_MOST_PATTERNS = 4096
# Largest number of patterns that are not plain names, because such patterns are slow to match.
_MOST_EXPRESSIONS = 64
# Largest number of instructions of all compiled patterns. A match runs at most this number for each character.
_MOST_INSTRUCTIONS = 8192
_MOST_INVOCATION_TOKENS = 1024
_MOST_TRAINED_TOKENS = 65536
_MOST_VERSION = 100

# Keys that have no effect after training, or that are checked against the tensors instead.
_IGNORED = frozenset(
    {
        "auto_mapping",
        "corda_config",
        "eva_config",
        # Layout of the base model's matrices. PEFT ignores it for linear layers.
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        # The key only configures sampling in training.
        "monteclora_config",
        # PEFT reads the key only with use_qalora.
        "qalora_group_size",
        "revision",
        "runtime_config",
        # The key only affects the backward pass.
        "velora_config",
    }
)

# Keys that ``read_config`` reads.
_READ = frozenset(
    {
        "alora_invocation_tokens",
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "init_lora_weights",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "task_type",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)

# Refused options, each with the reason.
_REFUSED = {
    "arrow_config": "routing between adapters is not supported",
    "kasa_config": "KaSA changes the base model's own weights, which all adapters share",
    "layer_replication": "it changes the base model, which all adapters share",
    "megatron_config": "Megatron's parallel layers are not supported",
    "use_bdlora": "block-diagonal factors are not supported",
    "use_qalora": "QALoRA's pooled inputs are not supported",
}

OF_EXPERTS = re.compile(r"(^|\.)(experts|input_linear|output_linear)(\.|$)")
"""Names of MoE experts, as one module or as separate modules."""

# Initialisations after which a trained adapter is an ordinary LoRA on the unchanged base model.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


Bias = Literal["none", "all", "lora_only"]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The computation that an ``adapter_config.json`` describes.

    Attributes:
        rank: rank of the modules that ``ranks`` does not name.
        alpha: alpha of the modules that ``alphas`` does not name.
        ranks: ranks of modules by pattern of their names. The first matching pattern applies.
        alphas: alpha of modules by pattern, as in ``ranks``.
        rslora: whether the factor is alpha / sqrt(rank), not alpha / rank.
        dora: whether the adapter has a magnitude for each row of a weight (DoRA, https://arxiv.org/abs/2402.09353).
        lora_bias: whether B has a bias.
        invocation_tokens: invocation tokens of an activated LoRA (https://arxiv.org/abs/2504.12397); empty for an
            ordinary adapter.
        targets: suffixes of the names of modules that may be adapted; None if the config has a regular expression.
        parameters: suffixes of names of weights that may be adapted although they are not in a linear layer, as in
            routers.
        excluded: suffixes of names that may not be adapted.
        layers: indices of the layers that may be adapted; None for all.
        saved: suffixes of names of modules whose whole weights come with the adapter (``modules_to_save``).
        token_indices: for an embedding or head, by the suffix of its name, the tokens whose rows come with the adapter.
        bias: modules whose biases are trained: none, all, or those with LoRA.
        ties_weights: whether the adapter's head is its embedding, if the base model's head is the base model's
            embedding.
        base: name of the base model that the adapter was trained on, if the config has it; used in error messages only.
        peft_version: version of PEFT that wrote the config; "" if the config does not have it. The version determines
            how stacked experts are stored.
    """

    rank: int
    alpha: float
    ranks: tuple[tuple[NamePattern, int], ...] = ()
    alphas: tuple[tuple[NamePattern, float], ...] = ()
    rslora: bool = False
    dora: bool = False
    lora_bias: bool = False
    invocation_tokens: tuple[int, ...] = ()
    targets: frozenset[str] | None = None
    parameters: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    layers: frozenset[int] | None = None
    saved: tuple[str, ...] = ()
    token_indices: tuple[tuple[str, tuple[int, ...]], ...] = ()
    bias: Bias = "none"
    ties_weights: bool = False
    base: str = ""
    peft_version: str = ""

    def rank_of(self, module: str) -> int:
        return next((rank for pattern, rank in self.ranks if pattern.matches(module)), self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of ``B A x`` for a module of this rank."""
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.matches(module)), self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def read_config(text: bytes) -> AdapterConfig:
    """Parse the bytes of an ``adapter_config.json``.

    Raises:
        AdapterError: the config is malformed, or an option is not computed exactly; ``option`` names the key.
    """
    fields = _parse(text)
    _refuse_unsupported(fields)
    config = AdapterConfig(
        rank=_rank(fields.get("r", 8), "r"),
        alpha=_alpha(fields.get("lora_alpha", 8), "lora_alpha"),
        ranks=tuple((key, _rank(value, "rank_pattern")) for key, value in _patterns(fields, "rank_pattern")),
        alphas=tuple((key, _alpha(value, "alpha_pattern")) for key, value in _patterns(fields, "alpha_pattern")),
        rslora=_flag(fields, "use_rslora"),
        dora=_flag(fields, "use_dora"),
        lora_bias=_flag(fields, "lora_bias"),
        invocation_tokens=_invocation_tokens(fields),
        targets=_names(fields.get("target_modules"), "target_modules"),
        parameters=_parameters(fields),
        excluded=_names(fields.get("exclude_modules"), "exclude_modules") or frozenset(),
        layers=_layers(fields),
        saved=tuple(sorted(_saved(fields))),
        token_indices=_token_indices(fields),
        bias=_bias(fields.get("bias")),
        ties_weights=_flag(fields, "ensure_weight_tying"),
        base=_base(fields.get("base_model_name_or_path")),
        peft_version=_version(fields.get("peft_version")),
    )
    _refuse_combinations(config)
    return config


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert the keys and values of a JSON object to a dict. Raises ValueError for a repeated key."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _parse(text: bytes) -> dict[str, Any]:
    if len(text) > MOST_BYTES:
        raise AdapterError(f"adapter_config.json has {len(text):,} bytes; the limit is {MOST_BYTES:,}.")
    try:
        fields = json.loads(text.decode("utf-8-sig"), object_pairs_hook=unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise AdapterError(f"adapter_config.json is malformed: {reason}.") from None
    if not isinstance(fields, dict):
        raise AdapterError(f"adapter_config.json must be a JSON object, not {_shown(fields)}.")
    return fields


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        raise AdapterError(
            f"peft_type is {_shown(fields.get('peft_type'))}; only adapters of type 'LORA' are supported.", "peft_type"
        )
    # The task determines which head PEFT expects, not what the factors compute. A separate head is among the saved
    # modules.
    if fields.get("task_type") not in (None, *_TASKS):
        raise AdapterError(f"task_type is {_shown(fields['task_type'])}; PEFT has {', '.join(_TASKS)}.", "task_type")
    for key, value in fields.items():
        if key in _IGNORED or key in _READ or not _is_used(value):
            continue
        reason = _REFUSED.get(key, "this option is unknown and might change the result")
        raise AdapterError(f"{key} = {_shown(value)} is not supported: {reason}.", key)
    _check_init(fields.get("init_lora_weights", True))


def _check_init(value: Any) -> None:
    if isinstance(value, bool) or value is None or value in _PLAIN_INITS:
        return
    raise AdapterError(
        f"init_lora_weights = {_shown(value)} is not supported: PEFT changes the base model's weights for it. Save "
        "the adapter with path_initial_model_for_weight_conversion, which converts it to an ordinary LoRA.",
        "init_lora_weights",
    )


def _refuse_combinations(config: AdapterConfig) -> None:
    """Refuse combinations that PEFT does not compute."""
    if config.dora and config.lora_bias:
        raise AdapterError("lora_bias and use_dora are both true; PEFT has no such combination.", "lora_bias")
    if config.dora and config.invocation_tokens:
        raise AdapterError(
            "use_dora is true and alora_invocation_tokens is given; PEFT has no such combination.",
            "alora_invocation_tokens",
        )
    replaced = {
        "modules_to_save": config.saved,
        "trainable_token_indices": config.token_indices,
        "bias": config.bias != "none",
    }
    for key, value in replaced.items():
        if value and config.invocation_tokens:
            raise AdapterError(
                f"{key} and alora_invocation_tokens are both given: PEFT computes {key} also for the tokens before the "
                "invocation, whose KV an activated LoRA shares with the base model. Train it without one of them.",
                key,
            )


def _is_used(value: Any) -> bool:
    return not (value is None or value is False or (isinstance(value, (list, dict, str)) and not value))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _flag(fields: Mapping[str, Any], key: str) -> bool:
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"{key} must be true or false, not {_shown(value)}.", key)
    return bool(value)


def _rank(value: Any, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AdapterError(f"{key} must give a rank of at least 1, not {_shown(value)}.", key)
    return value


def _alpha(value: Any, key: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value <= _MOST_ALPHA:
        raise AdapterError(
            f"{key} must give a number above 0 and at most {_MOST_ALPHA:,.0f}, not {_shown(value)}.", key
        )
    return float(value)


def _patterns(fields: Mapping[str, Any], key: str) -> list[tuple[NamePattern, Any]]:
    value = fields.get(key) or {}
    if not isinstance(value, dict):
        raise AdapterError(f"{key} must be an object from module names to numbers, not {_shown(value)}.", key)
    if len(value) > _MOST_PATTERNS:
        raise AdapterError(f"{key} has {len(value):,} entries; the limit is {_MOST_PATTERNS:,}.", key)
    patterns = [(NamePattern(pattern, key), number) for pattern, number in value.items()]
    if sum(not pattern.is_plain for pattern, _ in patterns) > _MOST_EXPRESSIONS:
        raise AdapterError(f"{key} has more than {_MOST_EXPRESSIONS} regular expressions: use names.", key)
    if (size := sum(pattern.program_size for pattern, _ in patterns)) > _MOST_INSTRUCTIONS:
        raise AdapterError(
            f"{key} has regular expressions of {size:,} instructions together; at most {_MOST_INSTRUCTIONS:,} are "
            "matched: use names.",
            key,
        )
    return patterns


def _invocation_tokens(fields: Mapping[str, Any]) -> tuple[int, ...]:
    key = "alora_invocation_tokens"
    value = fields.get(key)
    if value is None:
        return ()
    if (
        not isinstance(value, list)
        or not 1 <= len(value) <= _MOST_INVOCATION_TOKENS
        or not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 1 << 31 for token in value)
    ):
        raise AdapterError(
            f"{key} must be a list of 1 to {_MOST_INVOCATION_TOKENS:,} token ids, not {_shown(value)}.", key
        )
    return tuple(value)


def _names(value: Any, key: str) -> frozenset[str] | None:
    """Parse suffixes of module names; None for a regular expression or no value."""
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise AdapterError(f"{key} must be a list of module names or a string, not {_shown(value)}.", key)
    return frozenset(value)


def _base(value: Any) -> str:
    """Return ``org/name``, or the last part of a path, because the rest of a path on another machine is not useful."""
    if not isinstance(value, str):
        return ""
    return (
        value if re.fullmatch(r"[\w.-]+/[\w.-]+", value) else value.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
    )


def _version(value: Any) -> str:
    """Return a text that is short enough for a version, else "" for unknown, which works for most adapters."""
    return value if isinstance(value, str) and len(value) <= _MOST_VERSION else ""


def _parameters(fields: Mapping[str, Any]) -> frozenset[str]:
    key = "target_parameters"
    if isinstance(fields.get(key), str):
        raise AdapterError(f"{key} must be a list of names, not {_shown(fields[key])}.", key)
    return _names(fields.get(key), key) or frozenset()


def _saved(fields: Mapping[str, Any]) -> frozenset[str]:
    key = "modules_to_save"
    if isinstance(fields.get(key), str):
        raise AdapterError(f"{key} must be a list of module names, not {_shown(fields[key])}.", key)
    found = _names(fields.get(key), key) or frozenset()
    if "" in found:
        raise AdapterError(f"{key} has an empty name.", key)
    return found


def _token_indices(fields: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    key = "trainable_token_indices"
    value = fields.get(key)
    if not value:
        return ()
    by_module = value if isinstance(value, dict) else {"embed_tokens": value}
    for module, ids in by_module.items():
        if not module.endswith(("embed_tokens", "lm_head")):
            raise AdapterError(f"{key} names {_shown(module)}, but only embed_tokens and lm_head have tokens.", key)
        if (
            not isinstance(ids, list)
            or not 1 <= len(ids) <= _MOST_TRAINED_TOKENS
            or not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 1 << 31 for token in ids)
            or len(set(ids)) != len(ids)
        ):
            raise AdapterError(
                f"{key} must be a list of 1 to {_MOST_TRAINED_TOKENS:,} different token ids, or an object from module "
                f"names to such lists, not {_shown(value)}.",
                key,
            )
    return tuple((module, tuple(ids)) for module, ids in by_module.items())


def _bias(value: Any) -> Bias:
    if value is None or value in ("none", "all", "lora_only"):
        return value or "none"
    raise AdapterError(f"bias must be 'none', 'all' or 'lora_only', not {_shown(value)}.", "bias")


def _layers(fields: Mapping[str, Any]) -> frozenset[int] | None:
    key = "layers_to_transform"
    value = fields.get(key)
    if value is None or value == []:
        return None
    indices = value if isinstance(value, list) else [value]
    if not all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in indices):
        raise AdapterError(f"{key} must be a layer's index or a list of them, not {_shown(value)}.", key)
    return frozenset(indices)
