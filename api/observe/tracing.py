"""Tracing: writes one span for each admitted request, with OpenTelemetry's conventions for generative AI.

A span is written when the request has ended, with the times of the request's beginning and end. So a running request
needs no span object. Without ``--otlp-traces-endpoint`` no library is loaded. Spans never contain texts of prompts and
answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...engine.errors import ConfigError
from ..access.caller import Caller
from .request_observer import RequestEnd

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

    from ...engine.serving.request import TextRequest

_OPERATIONS = {"/v1/completions": "text_completion"}
_EXPORT_SECONDS = 5


def open_tracer(endpoint: str, version: str) -> Tracer:
    """Create a tracer that sends spans by OTLP over HTTP, in batches, on a separate thread.

    Raises:
        ConfigError: OpenTelemetry is not installed, or the endpoint is not a URL.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-traces-endpoint must be a URL of http or https, not {endpoint}.")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry, which is not installed. Try: pip install 'rootgraft[otel]'"
        ) from None
    return Tracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)), version)


class Tracer:
    """Writes spans. OpenTelemetry's environment variables (``OTEL_...``) determine the resource and the sampling.

    Args:
        processor: receives the spans.
        version: version of the server.
    """

    def __init__(self, processor: SpanProcessor, version: str) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider

        own = Resource({"service.name": "rootgraft", "service.version": version})
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rootgraft", version)

    def record(self, caller: Caller, requests: Sequence[TextRequest], end: RequestEnd) -> str:
        """Write the span of a request that has ended, as a child of the span in its headers. Returns the trace's id."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = _OPERATIONS.get(caller.path, "chat")
        span = self._tracer.start_span(
            f"{operation} {caller.facts.model or ''}",
            TraceContextTextMapPropagator().extract(caller.trace_context),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, **_of_requests(caller, requests), **_of_end(caller, end)},
            start_time=round(end.started * 1e9),
        )
        for reason in ("error", "timeout"):
            if reason in end.finished:
                span.set_attribute("error.type", reason)
                span.set_status(Status(StatusCode.ERROR))
        span.end(round((end.started + end.seconds) * 1e9))
        return f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Send the remaining spans. Blocks for a few seconds at most."""
        self._provider.shutdown()


def _of_requests(caller: Caller, requests: Sequence[TextRequest]) -> Mapping[str, Any]:
    first = requests[0]
    params = first.params
    attributes = {
        "gen_ai.provider.name": "rootgraft",
        "gen_ai.request.model": caller.facts.model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": float(params.frequency_penalty),
        "gen_ai.request.presence_penalty": float(params.presence_penalty),
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": first.n,
        "gen_ai.request.stream": caller.facts.stream,
        "gen_ai.output.type": "json" if first.grammar is not None and first.grammar.kind.is_json else "text",
        "rootgraft.adapter": first.adapter,
        "rootgraft.key": caller.key.name or None,
        "rootgraft.priority": first.priority.name.lower(),
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _of_end(caller: Caller, end: RequestEnd) -> Mapping[str, Any]:
    attributes = {
        "gen_ai.response.id": caller.facts.response_id,
        "gen_ai.response.model": caller.facts.model,
        "gen_ai.response.finish_reasons": tuple(reason for reason, count in end.finished.items() for _ in range(count)),
        "gen_ai.response.time_to_first_chunk": end.first_token_seconds,
        "gen_ai.usage.input_tokens": end.tokens.prompt,
        "gen_ai.usage.output_tokens": end.tokens.completion,
        "gen_ai.usage.cache_read.input_tokens": end.tokens.cached,
        "rootgraft.drafted_tokens": end.tokens.drafted,
    }
    if end.measured is not None:
        attributes |= {
            "rootgraft.queue_seconds": end.measured.queued,
            "rootgraft.prefill_seconds": end.measured.prefill,
            "rootgraft.decode_seconds": end.measured.decode,
        }
    return {name: value for name, value in attributes.items() if value is not None}
