"""Caller: the key, tenant, timeout and trace context of a request, and facts about the request for the access log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from ...engine.types import Priority
from ..errors import HTTPError
from .api_keys import Key


@dataclass(frozen=True, slots=True)
class GenerationFacts:
    """Facts about a finished generation, in the order of the access log. A fact that is None is not logged.

    Attributes:
        finished: number of sequences by finish reason. If it is set, ``first_token_seconds`` and ``adapter`` are logged
            even if they are None.
    """

    first_token_seconds: float | None = None
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    tokens_per_second: float | None = None
    batch_size: float | None = None
    kv_pages: int | None = None
    preemptions: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    drafted_tokens: int | None = None
    finished: Mapping[str, int] | None = None
    adapter: str | None = None

    def log_fields(self) -> dict[str, object]:
        nullable = () if self.finished is None else ("first_token_seconds", "adapter")
        return {name: value for name, value in _values(self) if value is not None or name in nullable}


@dataclass(slots=True)
class RequestFacts:
    """Facts about a request, in the order of the access log. A fact that is None is not logged.

    ``Guard`` sets ``key`` and ``tenant``. ``ModelDirectory.find`` sets ``version`` (a digest), and ``adapter_seconds``
    if the adapter had to be loaded. Routes set the fields up to ``ignored_fields``. ``generate`` sets ``generation``
    and ``trace_id`` at the end. The code of an error is set by the code that builds the error's response, or by
    ``generate`` if a stream ends with an error.
    """

    key: str | None = None
    model: str | None = None
    version: str | None = None
    adapter_seconds: float | None = None
    prompt_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    response_id: str | None = None
    ignored_fields: str | None = None
    generation: GenerationFacts | None = None
    error: str | None = None
    tenant: str | None = None
    trace_id: str | None = None

    def log_fields(self) -> dict[str, object]:
        """Return the facts that are set, including the facts of the generation."""
        logged: dict[str, object] = {}
        for name, value in _values(self):
            if isinstance(value, GenerationFacts):
                logged |= value.log_fields()
            elif value is not None:
                logged[name] = value
        return logged


def _values(facts: GenerationFacts | RequestFacts) -> Iterator[tuple[str, object]]:
    return ((each.name, getattr(facts, each.name)) for each in fields(facts))


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that has sent a request, and facts about the request.

    ``Guard`` creates one for each request that it admits, and the batch service for each line of a batch.

    Attributes:
        key: the request's key, ``ANYBODY`` if no keys are in use.
        cache_tenant: tenant whose requests may share the request's KV.
        timeout: seconds that the request may take; None for no limit.
        facts: facts about the request for the access log.
        path: the path of the URL.
        trace_context: the headers ``traceparent`` and ``tracestate``, if the request has them.
        usage_id: id of a batch line, so that the usage ledger counts the line only once, after it has been answered.
            None for other requests, which are always counted.
        asked_model: name of the model that the client requested, if another model answers; else None.
        is_strict: whether to refuse the request if its first token cannot be generated within the target time of its
            class.
    """

    key: Key
    cache_tenant: str
    timeout: float | None
    facts: RequestFacts
    path: str = ""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    usage_id: str | None = None
    is_strict: bool = False
    asked_model: str | None = None

    def told_model(self, name: str) -> str:
        """Return the name of the answering model for the log and the usage ledger."""
        return name if self.asked_model is None else f"{name} (for {self.asked_model})"

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the request may still take after its adapter was loaded; None for no limit."""
        waited = self.facts.adapter_seconds
        return self.timeout if self.timeout is None or waited is None else max(0.001, self.timeout - waited)

    def may_use(self, adapter: str) -> bool:
        return self.key.adapters is None or adapter in self.key.adapters

    def priority(self, requested: Priority | None) -> Priority:
        """Return the requested priority class, or the key's.

        Raises HTTPError 403 if the key does not allow the class.
        """
        if requested is None:
            return self.key.priority
        if requested < self.key.earliest:
            first = self.key.earliest.name.lower()
            raise HTTPError(
                403, f"'priority' must be '{first}' or a lower class with this key.", code="priority_not_allowed"
            )
        return requested
