"""Options that are JSON, parsed and checked: ``--speculative-config``, ``--hf-overrides``, ``--target-itl-ms``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError, shortened
from .types import Priority

METHODS = ("auto", "ngram", "draft_model", "eagle3", "mtp", "off")
_WITH_MODEL = ("draft_model", "eagle3")
_WITH_WEIGHTS = (*_WITH_MODEL, "mtp")
# Names of methods in vLLM: that of its suffix decoding, and those of MTP for kinds of models.
_ALIASES = {"suffix": "auto", "deepseek_mtp": "mtp", "glm4_moe_mtp": "mtp", "mimo_mtp": "mtp"}
MAX_SPECULATIVE_TOKENS = 64
QUANTIZATIONS = ("gguf", "gguf_dynamic", "int8_weight_only", "int8_dynamic", "widened")
_SPECULATIVE = "--speculative-config"
_NO_HEADS = "EAGLE-1, EAGLE-2 and Medusa heads are not supported. Without the option, drafts come from lookups."
HF_OVERRIDES = "--hf-overrides"
_TARGET_ITL = "--target-itl-ms"
_TARGET_TTFT = "--target-ttft-ms"
MAX_TARGET_MS = 60_000
# vLLM's keys that choose where drafts are searched.
_LOOKUP_KEYS = {"prompt_lookup_max", "prompt_lookup_min"}
# vLLM's keys of a draft model for which one value is accepted here.
_INERT_KEYS = {"draft_tensor_parallel_size": 1}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """``--speculative-config``: how tokens are drafted; JSON, as in vLLM. It affects speed, never the output.

    Attributes:
        method: ``auto``: grammars, prompt lookup, prefix cache and suffix decoding; ``ngram``: only prompt lookup;
            ``off``; ``draft_model``: like auto, with a draft model; ``eagle3``: like auto, with a head that reads the
            model's hidden states; ``mtp``: like auto, with the MTP module of the model's own checkpoint. If ``model``
            is set, auto means draft_model; if the model is a head, it is used as one.
        num_speculative_tokens: largest number of drafts of a sequence in one step, 1 to 64.
        model: the draft model, in the form of ``--model``; None if absent, and for mtp.
        quantization: quantization of the draft model, head or module. None for ``--quantization``; beside a bfloat16
            model without that option, None means gguf_dynamic for a GGUF file, else int8_dynamic.
    """

    method: str = "auto"
    num_speculative_tokens: int = 16
    model: str | None = None
    quantization: str | None = None

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """Parse the option. Raises ConfigError."""
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise ConfigError(f'{_SPECULATIVE} must be a JSON object such as {{"method": "ngram"}}, not {text}.')
        if unknown := sorted(values.keys() - {*cls.__slots__, *_LOOKUP_KEYS, *_INERT_KEYS}):
            raise ConfigError(f"{_SPECULATIVE} has no key {unknown[0]!r}; its keys are {', '.join(cls.__slots__)}.")
        for key, only in _INERT_KEYS.items():
            if values.get(key, only) != only:
                raise ConfigError(f"{key} of {_SPECULATIVE} must be {only}, not {values[key]}.")
        known = {key: value for key, value in values.items() if key in cls.__slots__}
        method = known.get("method", "auto")
        known["method"] = _ALIASES.get(method, method) if isinstance(method, str) else method
        if known["method"] == "auto" and known.get("model") is not None:
            known["method"] = "draft_model"
        config = cls(**known)
        config._check()
        return config

    def _check(self) -> None:
        if self.method not in METHODS:
            methods = ", ".join(METHODS)
            raise ConfigError(f"method of {_SPECULATIVE} must be one of {methods}, not {self.method}. {_NO_HEADS}")
        if not _is_speculative_count(self.num_speculative_tokens):
            raise ConfigError(
                f"num_speculative_tokens of {_SPECULATIVE} must be a whole number from 1 to {MAX_SPECULATIVE_TOKENS}, "
                f"not {self.num_speculative_tokens}."
            )
        if self.method in _WITH_MODEL and not (isinstance(self.model, str) and self.model):
            raise ConfigError(f"model of {_SPECULATIVE} must name the draft model, as --model does, not {self.model}.")
        if self.method == "mtp" and self.model is not None:
            raise ConfigError(
                f"model of {_SPECULATIVE} must not be given with method mtp: the MTP module is in the checkpoint of "
                "--model."
            )
        for key, with_key in (("model", _WITH_MODEL), ("quantization", _WITH_WEIGHTS)):
            if self.method not in with_key and getattr(self, key) is not None:
                raise ConfigError(f"{key} of {_SPECULATIVE} needs a draft model; method {self.method} has none.")
        if self.quantization not in (None, *QUANTIZATIONS):
            forms = ", ".join(QUANTIZATIONS)
            raise ConfigError(f"quantization of {_SPECULATIVE} must be one of {forms}, not {self.quantization}.")


@dataclass(frozen=True, slots=True)
class TargetItl:
    """``--target-itl-ms``: target inter-token latency of a stream by its priority class, in milliseconds; 0 for none.

    The option is one number for all classes, or JSON by class; classes that are not named have the default.
    """

    realtime: float = 100
    interactive: float = 100
    batch: float = 500

    @classmethod
    def parse(cls, text: str) -> TargetItl:
        """Parse the option. Raises ConfigError."""
        return cls(**_parse_targets(_TARGET_ITL, text, '{"interactive": 50, "batch": 500}'))

    @property
    def seconds(self) -> dict[Priority, float]:
        """The targets in seconds, for the classes that have one."""
        return _target_seconds(self)


@dataclass(frozen=True, slots=True)
class TargetTtft:
    """``--target-ttft-ms``: target time to first token by priority class, in milliseconds; 0 for none.

    The option is one number for all classes, or JSON by class; classes that are not named have no target.
    """

    realtime: float = 0
    interactive: float = 0
    batch: float = 0

    @classmethod
    def parse(cls, text: str) -> TargetTtft:
        """Parse the option. Raises ConfigError."""
        return cls(**_parse_targets(_TARGET_TTFT, text, '{"realtime": 500, "interactive": 2000}'))

    @property
    def seconds(self) -> dict[Priority, float]:
        """The targets in seconds, for the classes that have one."""
        return _target_seconds(self)


def _parse_targets(option: str, text: str, example: str) -> dict[str, float]:
    """Return milliseconds by the names of priority classes. Raises ConfigError."""
    names = [priority.name.lower() for priority in Priority]
    try:
        values = json.loads(text)
    except ValueError:
        values = text
    if not isinstance(values, dict):
        _check_target(option, values, f", or JSON such as {example}")
        return dict.fromkeys(names, values)
    if unknown := sorted(values.keys() - {*names}):
        raise ConfigError(f"{option} has no key {unknown[0]!r}; its keys are {', '.join(names)}.")
    for name, value in values.items():
        _check_target(f"{name} of {option}", value)
    return values


def _target_seconds(targets: TargetItl | TargetTtft) -> dict[Priority, float]:
    by_class = {priority: getattr(targets, priority.name.lower()) for priority in Priority}
    return {priority: target / 1000 for priority, target in by_class.items() if target}


def parse_overrides(text: str) -> dict[str, Any]:
    """Return the keys of ``--hf-overrides``, which replace those of ``config.json``. ConfigError for no object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{HF_OVERRIDES} must be a JSON object of keys of config.json, such as "
            f'{{"rope_scaling": {{"rope_type": "yarn", "factor": 4.0}}}}, not {shortened(text)}.'
        )
    return found


def _is_speculative_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SPECULATIVE_TOKENS


def _check_target(name: str, value: Any, other_form: str = "") -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value == 0 or 1 <= value <= MAX_TARGET_MS):
        raise ConfigError(
            f"{name} must be 0, for no target, or from 1 to {MAX_TARGET_MS} milliseconds{other_form}, not {value}."
        )
