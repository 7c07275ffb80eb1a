"""Message reply: the message object with content, stop reason and usage of one answer, and its server-sent events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson

from ...engine.types import FinishReason, Usage
from ..error_responses import anthropic_body
from ..errors import ErrorReply, reply_to
from ..generate.logprob_formats import field_probabilities
from ..generate.streams import Deltas, ReplyEnd
from ..structured.output_format import OutputFormat, tool_parser
from .message_blocks import MessageBlocks, MessageEvent
from .message_request import MessagesRequest

if TYPE_CHECKING:
    from ...engine.serving.output_processor import TextDelta
    from ...engine.serving.request import TextRequest
    from ...engine.text.field_probabilities import FieldProbability

_SHORT_TTL = 300  # Seconds. A longer pin is reported as a pin of one hour.


class MessageReply(ReplyEnd):
    """State of one answer, from its request to its end.

    Args:
        body: the request.
        request: the request to the engine.
        model: model name in the answer.
        output_format: the output format of the answer; tool calls in it become content blocks.
    """

    def __init__(
        self, body: MessagesRequest, request: TextRequest, model: str, output_format: OutputFormat | None
    ) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._blocks = MessageBlocks(tool_parser(output_format))
        self._shows_fields = body.field_probabilities
        self._fields: list[FieldProbability] = []
        # Number of field probabilities that events have contained already.
        self._num_told = 0
        self._num_prompt = len(request.tokens)
        self._is_cut = 0 < request.params.max_tokens < body.max_tokens
        self._is_prefill_only = body.max_tokens == 0
        pins = (*request.prefix_pins, (len(request.tokens), request.pin_seconds))
        self._num_long = max((tokens for tokens, seconds in pins if seconds > _SHORT_TTL), default=0)

    def begin(self) -> list[MessageEvent]:
        """Return the events before the content."""
        return [{"type": "message_start", "message": self._message([])}, {"type": "ping"}]

    def take(self, delta: TextDelta) -> list[MessageEvent]:
        """Add a delta. Returns its events. A delta with a finish reason ends the message, or sets ``failure``.

        The probabilities of fields are part of the event with the text that completes the fields.
        """
        events = self._blocks.take(delta)
        self._fields += delta.fields
        if events and (told := self._fields[self._num_told :]) and self._shows_fields:
            events[-1]["field_probabilities"] = field_probabilities(told)
            self._num_told = len(self._fields)
        if delta.finish is None:
            return events
        self._finish = delta.finish
        events += self._blocks.finish()
        if self.failure is None:
            end: dict[str, Any] = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
            if told := self._fields[self._num_told :]:
                end["field_probabilities"] = field_probabilities(told)
            events += [end, {"type": "message_stop"}]
        return events

    def body(self) -> dict[str, Any]:
        """Return the whole message.

        Raises ``failure`` if it is set, and EngineError if the engine did not end the message.
        """
        self.ended()
        fields = {"field_probabilities": field_probabilities(self._fields)} if self._shows_fields else {}
        return self._message(self._blocks.content()) | fields

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **self._stop(),
            "usage": self._usage(),
        }

    def _stop(self) -> dict[str, Any]:
        finish = self._finish
        if finish is None:
            return {"stop_reason": None, "stop_sequence": None}
        if finish.reason is FinishReason.LENGTH:
            reason = "model_context_window_exceeded" if self._is_cut else "max_tokens"
        elif finish.ended_by_budget:
            reason = "max_tokens"
        elif isinstance(finish.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_reason}
        else:
            reason = "tool_use" if self._blocks.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Return the usage. The prompt's tokens are the sum of those read from the cache, newly pinned, and others."""
        usage = Usage(self._num_prompt, 0, 0) if self._finish is None else self._finish.usage
        created = max(0, usage.pinned - usage.cached)
        long = max(0, min(usage.pinned, self._num_long) - usage.cached)
        return {
            "input_tokens": usage.prompt - usage.cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": usage.cached,
            "cache_creation": {
                "ephemeral_5m_input_tokens": created - long,
                "ephemeral_1h_input_tokens": long,
            },
            "output_tokens": 0 if self._is_prefill_only else usage.completion,
            "output_tokens_details": {"thinking_tokens": 0 if self._is_prefill_only else usage.reasoning},
            "service_tier": "standard",
        }


async def message_events(reply: MessageReply, deltas: Deltas, request_id: str) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of a message.

    The first event waits for the engine's first deltas, so that a refused request still gets an HTTP status. A later
    error becomes an ``error`` event, which is the last event.
    """
    events: list[MessageEvent] = []
    begun = False
    try:
        async with aclosing(deltas) as stream:
            async for several in stream:
                events = [] if begun else reply.begin()
                for delta in several:
                    events += reply.take(delta)
                failure = reply.failure
                if events and (begun or failure is None):
                    begun = True
                    yield b"".join(map(_written, events))
                if failure is not None:
                    raise failure
    except Exception as error:
        if not begun:
            raise
        yield error_event(reply_to(error), request_id)


def error_event(reply: ErrorReply, request_id: str) -> bytes:
    """Serialize an error as the last event of a stream."""
    return b"event: error\ndata: %b\n\n" % anthropic_body(reply, request_id)


def _written(event: MessageEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))
