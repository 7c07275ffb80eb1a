"""Response reply: the response object with status, output and usage of one response, and its server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from ...engine.types import FinishReason, SamplingParams
from ..errors import ErrorReply, reply_to
from ..exact_json import dumps_exact
from ..generate.logprob_formats import field_probabilities
from ..generate.streams import Deltas
from ..protocol.responses import ResponseRequest
from ..storage.event_store import EventLog
from ..structured.output_format import OutputFormat, tool_parser
from .conversation import new_id
from .output_items import Event, OutputItems

if TYPE_CHECKING:
    from ...engine.serving.output_processor import Finish, TextDelta

_TIMEOUT = ErrorReply(504, "The request timed out.", code="timeout")
_ABORTED = ErrorReply(500, "The answer was broken off.")
_INVALID_OUTPUT = ErrorReply(500, "The answer does not match the requested format.", code="internal_error")


class ResponseReply:
    """State of one response, from its request to its end.

    Args:
        body: the request.
        params: the request's sampling parameters, including the model's defaults.
        model: model name in the response.
        output_format: the output format of the answer; tool calls in it become items.
        stored: whether the response can be retrieved later.
        thinks: whether reasoning may precede the answer.

    Attributes:
        is_stored: whether the response can be retrieved later.
        status: ``queued`` (in the background), ``in_progress``, then ``completed``, ``incomplete``, ``failed`` or
            ``cancelled``.
    """

    def __init__(
        self,
        body: ResponseRequest,
        params: SamplingParams,
        model: str,
        output_format: OutputFormat | None,
        *,
        stored: bool,
        thinks: bool = False,
    ) -> None:
        self.id = new_id("resp")
        self.is_stored = stored
        self._is_prefill_only = not body.generate
        self.status = "queued" if body.background else "in_progress"
        self._output = OutputItems(tool_parser(output_format), body.num_logprobs, thinks=thinks)
        self._finish: Finish | None = None
        self._error: dict[str, Any] | None = None
        self._completed_at: int | None = None
        self._request_fields = _request_fields(body, params, model, stored=stored)
        self._created_at = int(time.time())
        self._fields: list[dict[str, Any]] | None = [] if body.field_probabilities else None
        # Field probabilities that no event has contained yet.
        self._held_fields: list[dict[str, Any]] = []

    def take(self, delta: TextDelta) -> list[Event]:
        """Add a delta. Returns its events. A delta with a finish reason ends the response."""
        events = self._output.take(delta)
        if self._fields is not None:
            self._take_fields(delta, events)
        if delta.finish is not None:
            events += self._end(delta.finish)
        return events

    def begin(self) -> None:
        """Set the status of a background response when its first tokens arrive."""
        self.status = "in_progress"

    def fail(self, reply: ErrorReply) -> None:
        """End the response with status ``failed`` and this error."""
        self._output.finish("incomplete")
        self.status = "failed"
        code = "server_error" if reply.status >= 500 else "invalid_prompt"
        self._error = {"code": code, "message": reply.message}

    def cancel(self) -> None:
        self._output.finish("incomplete")
        self.status = "cancelled"

    def last_event(self) -> Event:
        """Return the last event of a response that has ended."""
        return f"response.{self.status}", {"response": self.body()}

    def output(self) -> list[dict[str, Any]]:
        return self._output.items if self.status not in ("queued", "in_progress") else []

    def item_ids(self) -> tuple[str, ...]:
        return tuple(item["id"] for item in self.output())

    def body(self) -> dict[str, Any]:
        """Return the response object in OpenAI's format, in its current state."""
        is_incomplete = self.status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._completed_at,
            "status": self.status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "output": self.output(),
            "usage": None if self._finish is None else _usage(self._finish, is_prefill_only=self._is_prefill_only),
            **({} if self._fields is None else {"field_probabilities": self._fields}),
            **self._request_fields,
        }

    def _take_fields(self, delta: TextDelta, events: list[Event]) -> None:
        """Add field probabilities to the response, and to the next event with text of the answer."""
        assert self._fields is not None
        found = field_probabilities(delta.fields)
        self._fields += found
        self._held_fields += found
        for kind, fields in events:
            if kind == "response.output_text.delta" and self._held_fields:
                fields["field_probabilities"], self._held_fields = self._held_fields, []

    def _end(self, finish: Finish) -> list[Event]:
        self._finish = finish
        match finish.reason:
            case FinishReason.LENGTH if self._is_prefill_only:
                self.status, self._completed_at = "completed", int(time.time())
                return []
            case FinishReason.STOP if finish.ended_by_budget:
                self.status = "incomplete"
            case FinishReason.STOP:
                self.status, self._completed_at = "completed", int(time.time())
            case FinishReason.LENGTH:
                self.status = "incomplete"
            case FinishReason.TIMEOUT:
                events = self._output.finish("incomplete")
                self.fail(_TIMEOUT)
                return events
            case reason:
                events = self._output.finish("incomplete")
                self.fail(_INVALID_OUTPUT if reason is FinishReason.ERROR else _ABORTED)
                return events
        return self._output.finish(self.status)


def _usage(finish: Finish, *, is_prefill_only: bool) -> dict[str, Any]:
    usage = finish.usage
    if is_prefill_only:  # The engine samples one token in any case. This token is dropped.
        usage = replace(usage, completion=0, reasoning=0, drafted=0, forced=0)
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {
            "cached_tokens": usage.cached,
            "cache_write_tokens": 0,
            "forked_tokens": usage.forked,
            "pinned_tokens": usage.pinned,
        },
        "output_tokens": usage.completion,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "drafted_tokens": usage.drafted,
            "forced_tokens": usage.forced,
        },
        "total_tokens": usage.prompt + usage.completion,
    }


def _request_fields(body: ResponseRequest, params: SamplingParams, model: str, *, stored: bool) -> dict[str, Any]:
    """Return the fields of the request that the response repeats, with their defaults."""
    text_format: dict[str, Any] = {"type": body.text.format.type}
    if body.text.format.type == "json_schema":
        text_format = body.text.format.model_dump(by_alias=True, exclude_none=True)
        text_format["schema"] = _written(body.text.format.schema_)
    choice = body.tool_choice if isinstance(body.tool_choice, str) else _written(body.tool_choice.model_dump())
    return {
        "model": model,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "top_logprobs": body.top_logprobs,
        "text": {"format": text_format, "verbosity": "medium"},
        "tools": [_tool(tool.model_dump()) for tool in body.tools],
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        "truncation": "disabled",
        "background": body.background,
        "store": stored,
        "service_tier": "default",
        "metadata": body.metadata,
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        # Newer clients access these fields even if their library does not know the fields yet.
        **dict.fromkeys(("conversation", "moderation", "prompt", "prompt_cache_diagnostics", "prompt_cache_retention")),
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any] | orjson.Fragment:
    if tool["type"] != "function":
        return _written(tool)
    return {**tool, "parameters": _written(tool["parameters"]), "strict": bool(tool["strict"])}


def _written(value: Any) -> orjson.Fragment:
    """Return a value that ``orjson.dumps`` can serialize, because it does not serialize integers beyond 64 bits."""
    return orjson.Fragment(dumps_exact(value))


async def response_events(
    reply: ResponseReply,
    deltas: Deltas,
    keep: Callable[[ResponseReply], None],
    log: EventLog | None,
) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of a response.

    ``keep`` is called when the response has ended, before the last event.

    The first event waits for the engine's first deltas, so that a refused request still gets an HTTP status. A later
    error becomes an ``error`` event, and the response ends as ``failed``.

    Args:
        log: stores the events, which then have ids; None if the events are only sent.
    """
    writer = EventWriter(log)
    try:
        async with aclosing(deltas) as stream:
            async for several in stream:
                events = []
                if not writer.num_events:
                    body = reply.body()
                    events = [("response.created", {"response": body}), ("response.in_progress", {"response": body})]
                for delta in several:
                    events += reply.take(delta)
                if events:
                    yield writer.write(events)
    except Exception as error:
        if not writer.num_events:
            raise
        failure = reply_to(error)
        reply.fail(failure)
        yield writer.write([error_event(failure)])
    keep(reply)
    yield writer.write([reply.last_event()])
    writer.end()


async def write_in_background(
    reply: ResponseReply, deltas: Deltas, changed: Callable[[ResponseReply], None], writer: EventWriter
) -> None:
    """Generate a response in the background, and write its events.

    Args:
        changed: called when the response begins and when it has ended, before the respective event.
    """
    body = reply.body()
    writer.write([("response.created", {"response": body}), ("response.queued", {"response": body})])
    try:
        async with aclosing(deltas) as stream:
            async for several in stream:
                if reply.status == "queued":
                    reply.begin()
                    changed(reply)
                    writer.write([("response.in_progress", {"response": reply.body()})])
                writer.write([event for delta in several for event in reply.take(delta)])
    except asyncio.CancelledError:
        reply.cancel()
    except Exception as error:
        failure = reply_to(error)
        reply.fail(failure)
        writer.write([error_event(failure)])
    changed(reply)
    writer.write([reply.last_event()])
    writer.end()


def error_event(failure: ErrorReply) -> Event:
    return "error", {"code": failure.code, "message": failure.message, "param": failure.param}


class EventWriter:
    """Serializes events with sequence numbers.

    Args:
        log: stores the events; None if the events are only sent, without ids for later requests.

    Attributes:
        num_events: number of events written.
    """

    def __init__(self, log: EventLog | None) -> None:
        self.num_events = 0
        self._log = log

    def write(self, events: list[Event]) -> bytes:
        """Serialize the events as server-sent events."""
        written = []
        for kind, fields in events:
            data = orjson.dumps({"type": kind, "sequence_number": self.num_events, **fields})
            if self._log is None:
                written.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
            else:
                written.append(b"event: %b\nid: %d\ndata: %b\n\n" % (kind.encode(), self.num_events, data))
                self._log.append(written[-1])
            self.num_events += 1
        return b"".join(written)

    def end(self) -> None:
        """Record that no more events follow."""
        if self._log is not None:
            self._log.end()
