"""Options that are JSON, parsed and checked: ``--speculative-config``, ``--target-itl-ms``, ``--kv-events-config``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError
from .types import Priority

METHODS = ("auto", "ngram", "draft_model", "eagle3", "mtp", "off")
_WITH_MODEL = ("draft_model", "eagle3")
_WITH_WEIGHTS = (*_WITH_MODEL, "mtp")
# Other names of methods in vLLM: of its own suffix decoding, and of MTP by the kind of model.
_ALIASES = {"suffix": "auto", "deepseek_mtp": "mtp", "glm4_moe_mtp": "mtp", "mimo_mtp": "mtp"}
MAX_SPECULATIVE_TOKENS = 64
QUANTIZATIONS = ("gguf", "gguf_dynamic", "int8_weight_only", "int8_dynamic", "widened")
_SPECULATIVE = "--speculative-config"
_NO_HEADS = "EAGLE-1, EAGLE-2 and Medusa heads are not computed. Without the option drafts come from lookups alone."
_TARGET_ITL = "--target-itl-ms"
_KV_EVENTS = "--kv-events-config"
_MOST_BATCHES = 1 << 20
MAX_TARGET_ITL_MS = 60_000
# vLLM's keys that choose where drafts are looked for.
_LOOKUP_KEYS = {"prompt_lookup_max", "prompt_lookup_min"}
# vLLM's keys of a draft model with one value here.
_INERT_KEYS = {"draft_tensor_parallel_size": 1}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """``--speculative-config``: how tokens are drafted; JSON, as in vLLM. Changes speed, never the output.

    Attributes:
        method: auto: grammars, prompt lookup, prefix cache and suffix decoding; ngram: prompt lookup alone; off;
            draft_model: as auto, and a draft model; eagle3: as auto, and a head that reads the model's hidden states;
            mtp: as auto, and the MTP module of the model's own checkpoint.
            A ``model`` makes draft_model of auto, and a head that it names is one all the same.
        num_speculative_tokens: most drafts of a sequence in one step, 1 to 64.
        model: the draft model, as ``--model``; None for none, and for mtp.
        quantization: of the draft model, head or module; None for ``--quantization``, and beside a bfloat16 model
            without one for gguf_dynamic of a GGUF file, else int8_dynamic.
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
            raise ConfigError(f"{_SPECULATIVE} has no {unknown[0]!r}; it has {', '.join(cls.__slots__)}.")
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

    @property
    def needs_weights(self) -> bool:
        """Whether a model, head or module drafts, which has weights of its own."""
        return self.method in _WITH_WEIGHTS

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
                f"model of {_SPECULATIVE} must be left out with method mtp: its module is in the checkpoint of --model."
            )
        for key, with_key in (("model", _WITH_MODEL), ("quantization", _WITH_WEIGHTS)):
            if self.method not in with_key and getattr(self, key) is not None:
                raise ConfigError(f"{key} of {_SPECULATIVE} is of a draft model; method {self.method} has none.")
        if self.quantization not in (None, *QUANTIZATIONS):
            forms = ", ".join(QUANTIZATIONS)
            raise ConfigError(f"quantization of {_SPECULATIVE} must be one of {forms}, not {self.quantization}.")


@dataclass(frozen=True, slots=True)
class TargetItl:
    """``--target-itl-ms``: target inter-token latency of a stream by its priority class, in milliseconds; 0 for none.

    The option is one number for all classes, or JSON; a class that it does not name has the default.
    """

    realtime: float = 100
    interactive: float = 100
    batch: float = 500

    @classmethod
    def parse(cls, text: str) -> TargetItl:
        """Parse the option. Raises ConfigError."""
        try:
            values = json.loads(text)
        except ValueError:
            values = text
        if not isinstance(values, dict):
            _check_target_itl(_TARGET_ITL, values, ', or JSON such as {"interactive": 50, "batch": 500}')
            return cls(values, values, values)
        if unknown := sorted(values.keys() - {*cls.__slots__}):
            raise ConfigError(f"{_TARGET_ITL} has no {unknown[0]!r}; it has {', '.join(cls.__slots__)}.")
        for name, value in values.items():
            _check_target_itl(f"{name} of {_TARGET_ITL}", value)
        return cls(**values)

    @property
    def seconds(self) -> dict[Priority, float]:
        """Targets in seconds, of the classes that have one."""
        targets = {Priority[name.upper()]: getattr(self, name) for name in self.__slots__}
        return {priority: target / 1000 for priority, target in targets.items() if target}


def _is_speculative_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SPECULATIVE_TOKENS


def _check_target_itl(name: str, value: Any, other_form: str = "") -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value == 0 or 1 <= value <= MAX_TARGET_ITL_MS):
        raise ConfigError(
            f"{name} must be 0, for no target, or from 1 to {MAX_TARGET_ITL_MS} milliseconds{other_form}, not {value}."
        )


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """``--kv-events-config``: JSON, as in vLLM.

    Attributes:
        enable_kv_cache_events: whether events are published.
        publisher: zmq, or null for none.
        endpoint: on which a PUB socket is bound.
        replay_endpoint: on which a ROUTER socket answers with past batches; None for none.
        buffer_steps: batches that are kept for it.
        hwm: batches that wait for a slow subscriber before further ones are lost to it.
        topic: of all batches.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""

    @classmethod
    def parse(cls, text: str) -> KvEventsConfig:
        """Parse the option. Raises ConfigError."""
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise ConfigError(f'{_KV_EVENTS} must be JSON such as {{"enable_kv_cache_events": true}}, not {text}.')
        values.pop("max_queue_size", None)  # of vLLM's: batches are sent at once, none is queued
        if unknown := sorted(values.keys() - {*cls.__slots__}):
            raise ConfigError(f"{_KV_EVENTS} has no {unknown[0]!r}; it has {', '.join(cls.__slots__)}.")
        for name, kind in (("enable_kv_cache_events", bool), ("endpoint", str), ("topic", str)):
            if not isinstance(values.get(name, kind()), kind):
                raise ConfigError(f"{_KV_EVENTS}: {name} must be a {kind.__name__}, not {json.dumps(values[name])}.")
        for name in ("buffer_steps", "hwm"):
            value = values.get(name, 1)
            if type(value) is not int or not 1 <= value <= _MOST_BATCHES:
                raise ConfigError(f"{_KV_EVENTS}: {name} must be 1 to {_MOST_BATCHES}, not {json.dumps(value)}.")
        if not isinstance(values.get("replay_endpoint"), str | None):
            raise ConfigError(f"{_KV_EVENTS}: replay_endpoint must be a string or null.")
        if values.get("publisher", "zmq") not in ("zmq", "null", None):
            raise ConfigError(f"{_KV_EVENTS}: publisher must be zmq or null, not {json.dumps(values['publisher'])}.")
        return cls(**values | {"publisher": values.get("publisher", "zmq") or "zmq"})

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"
