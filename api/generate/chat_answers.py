"""Chat answers: builds chat completion bodies, and the chunks of chat completion streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from ...engine.serving.output_processor import BUDGET, end_tokens
from ..observe.token_usage import UsageCount, finish_fields, usage_body
from ..protocol.chat import ChatRequest
from ..structured.tool_parser import ToolParser, read_calls
from ..structured.tool_plan import Arguments, CallStart, Content, Event, ParsedCall, ToolPlan
from .envelope import Envelope
from .logprob_formats import chat_logprobs, field_probabilities, prompt_logprobs, written_chat_logprobs

if TYPE_CHECKING:
    from ...engine.serving.output_processor import SequenceOutput, TextDelta


def chat_body(
    request: ChatRequest,
    envelope: Envelope,
    outputs: Mapping[tuple[int, int], SequenceOutput],
    usage: UsageCount,
    plan: ToolPlan | None,
    prompt: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the body of a whole response. With a ``plan``, tool calls are parsed out of the text.

    Args:
        prompt: the prompt's tokens, for ``return_token_ids``.
    """
    body = envelope.fields()
    body["choices"] = [_choice(request, index, outputs[0, index], plan) for index in range(request.n)]
    body["usage"] = usage.body()
    if request.return_token_ids:
        body["prompt_token_ids"] = list(prompt)
    if request.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(outputs[0, 0].prompt_logprobs, request.prompt_logprobs)
    return body


def _choice(request: ChatRequest, index: int, output: SequenceOutput, plan: ToolPlan | None) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": output.text,
        "refusal": None,
        **_reasoning_fields(output.reasoning or None),
    }
    finish = finish_fields(output.finish)
    if plan is not None:
        message["content"], calls = read_calls(plan, message["content"])
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [_call_fields(call) for call in calls]
            _finish_with_calls(finish, is_whole=calls[-1].is_whole)
    if output.reasoning:
        message["content"] = message["content"] or None
    if request.echoed_text:
        message["content"] = request.echoed_text + (message["content"] or "")
    num_top = request.num_shown
    logprobs = None if num_top is None else written_chat_logprobs(output.logprobs, num_top)
    ids = {"token_ids": output.token_ids} if request.return_token_ids else {}
    fields = {"field_probabilities": field_probabilities(output.fields)} if request.field_probabilities else {}
    return {"index": index, "message": message, "logprobs": logprobs, **finish, **ids, **fields}


def _call_fields(call: ParsedCall) -> dict[str, Any]:
    if call.is_custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reasoning_fields(text: str | None) -> dict[str, Any]:
    """Return the reasoning under both names that clients read: vLLM's newer one, and the older one of other servers."""
    return {"reasoning_content": text, "reasoning": text}


def _finish_with_calls(finish: dict[str, Any], *, is_whole: bool) -> None:
    """Set the finish reason of an answer with calls, unless a stop string of the client cut off the last call."""
    if finish["finish_reason"] == "stop" and (is_whole or finish["stop_reason"] in (None, BUDGET)):
        finish["finish_reason"] = "tool_calls"


class ChatChunks:
    """Serializes the chunks of one stream. Plain content is joined from prepared bytes.

    Args:
        prompt: tokens of the prompt, for usage in every chunk and for ``return_token_ids``.
        plan: how to parse tool calls out of the text, None if there are none.
    """

    def __init__(self, request: ChatRequest, envelope: Envelope, prompt: Sequence[int], plan: ToolPlan | None) -> None:
        self.envelope, self.include_usage = envelope, request.include_usage
        self._num_logprobs = request.num_shown
        self._continuous = request.continuous_usage
        self._num_prompt = len(prompt)
        self._returns_ids = request.return_token_ids
        # Sent only with the first chunk.
        self._prompt_ids = list(prompt) if request.return_token_ids else None
        # Further fields of the delta that is being serialized. The first event built for the delta contains them.
        self._more: dict[str, Any] = {}
        self._num_tokens = 0
        self._parsers = {} if plan is None else {index: ToolParser(plan) for index in range(request.n)}
        self._calling: set[int] = set()
        self._unbegun = range(request.n)
        self._echo = request.echoed_text
        self._start = envelope.event_start()
        self._end = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"

    def events(self, delta: TextDelta) -> bytes:
        """Return the events for a delta; empty while the delta's text is held back."""
        self._more = {}
        events = self._begin()
        self._num_tokens += len(delta.tokens) + len(end_tokens(delta.finish))
        if delta.fields:
            self._more["field_probabilities"] = field_probabilities(delta.fields)
        logprobs = None if self._num_logprobs is None else chat_logprobs(delta.logprobs, self._num_logprobs)
        if self._returns_ids:
            self._more |= _token_ids([*delta.tokens, *end_tokens(delta.finish)])
        if delta.reasoning:
            events.append(self._event(delta.index, _reasoning_fields(delta.reasoning), logprobs))
            logprobs = None
        if delta.index in self._parsers:
            events += self._parse(delta, logprobs)
        elif delta.text or (logprobs and delta.logprobs):
            events.append(self._event(delta.index, {"content": delta.text}, logprobs))
        if delta.finish is not None:
            finish = finish_fields(delta.finish)
            if delta.index in self._calling:
                _finish_with_calls(finish, is_whole=not self._parsers[delta.index].is_inside_call)
            events.append(self._event(delta.index, {}, None, finish))
        if self._more:
            # The text is held back, but the other fields are sent now.
            events.append(self._event(delta.index, {"content": ""}))
        return b"".join(events)

    def _begin(self) -> list[bytes]:
        """Return the first events of all choices, in order; none after the first call.

        Clients append a choice when they first see it. OpenAI's Python client then finds it by its index as a position,
        so it would mix two choices up if the second one began first.
        """
        events = []
        for index in self._unbegun:
            content = None if index in self._parsers else ""
            events.append(self._event(index, {"role": "assistant", "content": content}))
            if self._echo:
                events.append(self._event(index, {"content": self._echo}))
        self._unbegun = range(0)
        return events

    def _parse(self, delta: TextDelta, logprobs: dict[str, Any] | None) -> list[bytes]:
        """Return the events for a delta that may contain tool calls. Its logprobs are sent with the first event."""
        parser = self._parsers[delta.index]
        found = parser.push(delta.text)
        if delta.finish is not None:
            found += parser.finish()
        if any(isinstance(event, CallStart) for event in found):
            self._calling.add(delta.index)
        pieces = [_delta_of(event) for event in found]
        if logprobs and not pieces and delta.logprobs:
            pieces = [{"content": ""}]
        return [
            self._event(delta.index, piece, None if number or not delta.logprobs else logprobs)
            for number, piece in enumerate(pieces)
        ]

    def _event(
        self,
        index: int,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: dict[str, Any] | None = None,
    ) -> bytes:
        rest = b',"logprobs":null,"finish_reason":null}]'
        more, self._more = self._more, {}
        if logprobs is not None or finish is not None or more:
            fields = {"logprobs": logprobs, **(finish or {"finish_reason": None}), **more}
            rest = b"," + orjson.dumps(fields)[1:] + b"]"
        end = self._end
        if self._continuous:
            end = b',"usage":' + orjson.dumps(usage_body(self._num_prompt, self._num_tokens)) + b"}\n\n"
        if self._prompt_ids is not None:
            rest += b',"prompt_token_ids":' + orjson.dumps(self._prompt_ids)
            self._prompt_ids = None
        return b'%b%d,"delta":%b%b%b' % (self._start, index, orjson.dumps(content), rest, end)


def _token_ids(tokens: list[int]) -> dict[str, Any]:
    return {"token_ids": tokens} if tokens else {}


def _delta_of(event: Event) -> dict[str, Any]:
    """Return OpenAI's delta: a call's id, type and name once, then pieces of its arguments."""
    match event:
        case Content():
            return {"content": event.text}
        case CallStart() if event.is_custom:
            custom = {"name": event.name, "input": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "custom", "custom": custom}]}
        case CallStart():
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        case Arguments() if event.is_custom:
            return {"tool_calls": [{"index": event.index, "custom": {"input": event.text}}]}
        case Arguments():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
