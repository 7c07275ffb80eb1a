"""Answers of chat completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson

from ..observe.token_usage import UsageCount, finish_reason, min_completion_tokens, usage_body
from ..protocol.chat import ChatRequest
from ..structured.tool_parser import Arguments, CallStart, Content, Event, ToolParser, ToolPlan, read_calls
from .collect import Answer
from .envelope import Envelope
from .logprob_formats import chat_logprobs, prompt_logprobs
from .sse import DONE
from .streams import Deltas

if TYPE_CHECKING:
    from ...engine.serving.output_processor import TextDelta


def chat_body(
    request: ChatRequest,
    head: Envelope,
    answers: Mapping[tuple[int, int], Answer],
    usage: UsageCount,
    plan: ToolPlan | None,
) -> dict[str, Any]:
    """The whole answer; with a ``plan``, calls are read out of it."""
    body = head.fields()
    body["choices"] = [_choice(request, index, answers[0, index], plan) for index in range(request.n)]
    body["usage"] = usage.body()
    if request.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(answers[0, 0].prompt_logprobs, request.prompt_logprobs)
    return body


def _choice(request: ChatRequest, index: int, answer: Answer, plan: ToolPlan | None) -> dict[str, Any]:
    asked = request.num_logprobs
    message: dict[str, Any] = {"role": "assistant", "content": "".join(answer.text), "refusal": None}
    reason = answer.reason
    if plan is not None:
        message["content"], calls = read_calls(plan, message["content"])
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
            reason = _with_calls(reason)
    fields = {
        "index": index,
        "message": message,
        "logprobs": None if asked is None else chat_logprobs(answer.logprobs, asked),
        "finish_reason": reason,
        "stop_reason": answer.stop_reason,
    }
    return fields if answer.min_tokens is None else fields | {"min_completion_tokens": answer.min_tokens}


def _with_calls(reason: str) -> str:
    return "tool_calls" if reason == "stop" else reason


async def chat_events(
    request: ChatRequest, head: Envelope, deltas: Deltas, num_prompt: int, plan: ToolPlan | None
) -> AsyncGenerator[bytes, None]:
    """The answer in events: role, content and calls, finish reason of each choice, usage if asked for, DONE."""
    chunks = _Chunks(request, head, num_prompt, plan)
    usage = UsageCount(drop_completion=request.is_prefill_only)
    async with aclosing(deltas) as stream:
        async for _, several in stream:
            events = []
            for delta in several:
                events += chunks.of(delta)
                if delta.finish is not None:
                    usage.add(0, delta.finish.usage)
            if events:
                yield b"".join(events)
    end = head.event(choices=[], usage=usage.body()) if request.include_usage else b""
    yield end + DONE


class _Chunks:
    """Makes the chunks of one stream. Plain content is put together from prepared bytes."""

    def __init__(self, request: ChatRequest, head: Envelope, num_prompt: int, plan: ToolPlan | None) -> None:
        self._asked = request.num_logprobs
        self._continuous = request.continuous_usage
        self._num_prompt = num_prompt
        self._num_tokens = 0
        self._parsers = {} if plan is None else {index: ToolParser(plan) for index in range(request.n)}
        self._calling: set[int] = set()
        self._begun: set[int] = set()
        self._start = head.event_start()
        self._end = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"

    def of(self, delta: TextDelta) -> list[bytes]:
        """The events for a delta: none if it only holds text back."""
        events = []
        self._num_tokens += len(delta.tokens)
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            nothing_yet = None if delta.index in self._parsers else ""
            events.append(self._event(delta.index, {"role": "assistant", "content": nothing_yet}))
        logprobs = None if self._asked is None else chat_logprobs(delta.logprobs, self._asked)
        if delta.index in self._parsers:
            events += self._read(delta, logprobs)
        elif delta.text or delta.logprobs:
            events.append(self._event(delta.index, {"content": delta.text}, logprobs))
        if delta.finish is not None:
            reason = finish_reason(delta.finish)
            reason = _with_calls(reason) if delta.index in self._calling else reason
            end: dict[str, Any] = {"finish_reason": reason, "stop_reason": delta.finish.stop_reason}
            least = min_completion_tokens(delta.finish)
            if least is not None:
                end["min_completion_tokens"] = least
            events.append(self._event(delta.index, {}, None, end))
        return events

    def _read(self, delta: TextDelta, logprobs: dict[str, Any] | None) -> list[bytes]:
        """The events for a delta in which there may be calls. Logprobs go with the first."""
        parser = self._parsers[delta.index]
        found = parser.push(delta.text)
        if delta.finish is not None:
            found += parser.finish()
        if any(isinstance(event, CallStart) for event in found):
            self._calling.add(delta.index)
        pieces = [_delta_of(event) for event in found]
        if delta.logprobs and not pieces:
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
        end_fields: dict[str, Any] | None = None,
    ) -> bytes:
        rest = b',"logprobs":null,"finish_reason":null}]'
        if logprobs is not None or end_fields is not None:
            fields = {"logprobs": logprobs, **(end_fields or {"finish_reason": None})}
            rest = b"," + orjson.dumps(fields)[1:] + b"]"
        end = self._end
        if self._continuous:
            end = b',"usage":' + orjson.dumps(usage_body(self._num_prompt, self._num_tokens)) + b"}\n\n"
        return b'%b%d,"delta":%b%b%b' % (self._start, index, orjson.dumps(content), rest, end)


def _delta_of(event: Event) -> dict[str, Any]:
    """OpenAI's delta: id, type and name of a call once, then pieces of its arguments."""
    match event:
        case Content():
            return {"content": event.text}
        case CallStart():
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        case Arguments():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
