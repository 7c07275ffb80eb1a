"""Relayed metrics: sends a gateway's observations of its requests to the metrics of the main process.

    gateway: RelayedMetrics --a list of observations, a few times a second--> main process: observe_relayed --> Metrics

So one exposition of metrics covers the requests of all gateways, and no counter decreases when a gateway ends.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import astuple
from typing import Any

from ...engine.types import SequenceStats, Usage
from ..observe.metrics import Metrics
from ..observe.token_usage import TokenCounts

_RELAYED = frozenset(
    (
        *("observe_prompt", "observe_first", "observe_between", "observe_end", "observe_longest"),
        *("count_end", "count_rejection", "count_http", "count_error", "count_structured", "count_broken"),
        *("count_reasoning", "count_usage"),
    )
)


class RelayedMetrics(Metrics):
    """Collects observations until they are taken. Belongs to one event loop."""

    def __init__(self) -> None:
        super().__init__("", dict)
        self._observed: list[list[Any]] = []

    def take(self) -> list[list[Any]]:
        """Return the observations since the last call, as plain values."""
        observed, self._observed = self._observed, []
        return observed

    def observe_prompt(self, num_tokens: int, num_answers: int, max_tokens: int) -> None:
        self._observed.append(["observe_prompt", num_tokens, num_answers, max_tokens])

    def observe_first(self, seconds: float) -> None:
        self._observed.append(["observe_first", seconds])

    def observe_between(self, seconds: float) -> None:
        self._observed.append(["observe_between", seconds])

    def observe_end(self, seconds: float, usage: Usage, stats: SequenceStats | None) -> None:
        self._observed.append(["observe_end", seconds, astuple(usage), None if stats is None else astuple(stats)])

    def observe_longest(self, num_tokens: int) -> None:
        self._observed.append(["observe_longest", num_tokens])

    def count_end(self, reason: str) -> None:
        self._observed.append(["count_end", str(reason)])

    def count_rejection(self, reason: str) -> None:
        self._observed.append(["count_rejection", reason])

    def count_http(self, handler: str, method: str, status: int) -> None:
        self._observed.append(["count_http", handler, method, status])

    def count_error(self, code: str) -> None:
        self._observed.append(["count_error", code])

    def count_structured(self, kind: str) -> None:
        self._observed.append(["count_structured", str(kind)])

    def count_broken(self, answers: int) -> None:
        self._observed.append(["count_broken", answers])

    def count_reasoning(self, tokens: int) -> None:
        self._observed.append(["count_reasoning", tokens])

    def count_usage(
        self, key: str, adapter: str | None, tokens: TokenCounts, loaded: Container[str], *, requests: int = 1
    ) -> None:
        self._observed.append(["count_usage", key, adapter, astuple(tokens), requests])


def observe_relayed(metrics: Metrics, observed: Sequence[list[Any]], loaded: Container[str]) -> None:
    """Add a gateway's observations to the metrics.

    Args:
        loaded: names of the adapters that are currently loaded.

    Raises:
        ValueError: gateways do not relay this kind of observation.
    """
    for name, *values in observed:
        if name not in _RELAYED:
            raise ValueError(f"not an observation of a gateway: {name}")
        if name == "observe_end":
            seconds, usage, stats = values
            metrics.observe_end(seconds, Usage(*usage), None if stats is None else SequenceStats(*stats))
        elif name == "count_usage":
            key, adapter, tokens, requests = values
            metrics.count_usage(key, adapter, TokenCounts(*tokens), loaded, requests=requests)
        else:
            getattr(metrics, name)(*values)
