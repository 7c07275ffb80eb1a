"""Who sends a request, and what that allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...engine.types import Priority
from ..errors import HTTPError
from .api_keys import Key


@dataclass(frozen=True, slots=True)
class Caller:
    """Made by ``Guard`` for each request that it lets through.

    Attributes:
        key: the key that it came with, ``ANYBODY`` where none are in use.
        cache_tenant: who alone may share the KV of the request.
        timeout: seconds that it may take; None for no bound.
        facts: what the log says of it; routes add to it.
        path: of its URL.
        trace_context: its headers ``traceparent`` and ``tracestate``, where it has them.
    """

    key: Key
    cache_tenant: str
    timeout: float | None
    facts: dict[str, Any]
    path: str = ""
    trace_context: Mapping[str, str] = field(default_factory=dict)

    def may_use(self, adapter: str) -> bool:
        """Whether the key may use an adapter of this name."""
        return self.key.adapters is None or adapter in self.key.adapters

    def band(self, asked: Priority | None) -> Priority:
        """The band of a request: the one asked for, or the key's. HTTPError 403 if it is too early for the key."""
        if asked is None:
            return self.key.priority
        if asked < self.key.earliest:
            first = self.key.earliest.name.lower()
            raise HTTPError(403, f"'priority' must be '{first}' or later with this key.", code="priority_not_allowed")
        return asked
