"""``--kv-events-config``: JSON, as in vLLM, parsed and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError

_OPTION = "--kv-events-config"
MOST_BATCHES = 1 << 20


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Whether and where KV events are published.

    Attributes:
        enable_kv_cache_events: whether events are published.
        publisher: zmq, or null for none.
        endpoint: address on which a PUB socket is bound.
        replay_endpoint: address on which a ROUTER socket answers with past batches; None for no such socket.
        buffer_steps: number of past batches that are kept for the ROUTER socket.
        hwm: number of batches that may wait for a slow subscriber; further ones are not sent to it.
        topic: topic of all batches.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = "zmq"
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
            raise ConfigError(f'{_OPTION} must be JSON such as {{"enable_kv_cache_events": true}}, not {text}.')
        # Key of vLLM without effect here: batches are sent at once, and none is queued.
        values.pop("max_queue_size", None)
        if unknown := sorted(values.keys() - {*cls.__slots__}):
            raise ConfigError(f"{_OPTION} has no key {unknown[0]!r}; its keys are {', '.join(cls.__slots__)}.")
        for name, value in values.items():
            _check(name, value)
        return cls(**values)

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


def _check(name: str, value: Any) -> None:
    if name == "enable_kv_cache_events":
        is_right, right = isinstance(value, bool), "true or false"
    elif name in ("buffer_steps", "hwm"):
        is_right, right = type(value) is int and 1 <= value <= MOST_BATCHES, f"1 to {MOST_BATCHES}"
    elif name == "publisher":
        is_right, right = value in ("zmq", "null", None), "zmq or null"
    elif name == "replay_endpoint":
        is_right, right = isinstance(value, str | None), "a string or null"
    else:
        is_right, right = isinstance(value, str), "a string"
    if not is_right:
        raise ConfigError(f"{_OPTION}: {name} must be {right}, not {json.dumps(value)}.")
