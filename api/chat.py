"""Answers of chat completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson

from api.collect import Answer
from api.logprobs import chat_logprobs, prompt_logprobs
from api.protocol.chat import ChatRequest
from api.reply import ReplyHead
from api.sse import DONE
from api.streams import Deltas
from api.usage import UsageCount, finish_reason, usage_body

if TYPE_CHECKING:
    from engine.generation import TextDelta


def chat_body(
    request: ChatRequest, head: ReplyHead, answers: Mapping[tuple[int, int], Answer], usage: UsageCount
) -> dict[str, Any]:
    """The whole answer."""
    body = head.fields()
    body["choices"] = [_choice(request, index, answers[0, index]) for index in range(request.n)]
    body["usage"] = usage.body()
    if request.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(answers[0, 0].prompt_logprobs, request.prompt_logprobs)
    return body


def _choice(request: ChatRequest, index: int, answer: Answer) -> dict[str, Any]:
    asked = request.num_logprobs
    return {
        "index": index,
        "message": {"role": "assistant", "content": "".join(answer.text), "refusal": None},
        "logprobs": None if asked is None else chat_logprobs(answer.logprobs, asked),
        "finish_reason": answer.reason,
        "stop_reason": answer.stop_reason,
    }


async def chat_events(
    request: ChatRequest, head: ReplyHead, deltas: Deltas, num_prompt: int
) -> AsyncGenerator[bytes, None]:
    """The answer in events: role, content, finish reason of each choice, usage if asked for, DONE."""
    chunks = _Chunks(request, head, num_prompt)
    usage = UsageCount()
    async with aclosing(deltas) as stream:
        async for _, several in stream:
            events = []
            for delta in several:
                events += chunks.of(delta)
                if delta.finish is not None:
                    usage.add(0, delta.finish.usage)
            if events:
                yield b"".join(events)
    if request.include_usage:
        yield head.event(choices=[], usage=usage.body())
    yield DONE


class _Chunks:
    """Makes the chunks of one stream. Plain content is put together from prepared bytes."""

    def __init__(self, request: ChatRequest, head: ReplyHead, num_prompt: int) -> None:
        self._asked = request.num_logprobs
        self._continuous = request.continuous_usage
        self._num_prompt = num_prompt
        self._num_tokens = 0
        self._begun: set[int] = set()
        self._start = head.event_start()
        self._end = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"

    def of(self, delta: TextDelta) -> list[bytes]:
        """The events for a delta: none if it only holds text back."""
        events = []
        self._num_tokens += len(delta.tokens)
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            events.append(self._event(delta.index, {"role": "assistant", "content": ""}))
        if delta.text or delta.logprobs:
            logprobs = None if self._asked is None else chat_logprobs(delta.logprobs, self._asked)
            events.append(self._event(delta.index, {"content": delta.text}, logprobs))
        if delta.finish is not None:
            reason, stop = finish_reason(delta.finish), delta.finish.stop_reason
            events.append(self._event(delta.index, {}, None, reason, stop))
        return events

    def _event(
        self,
        index: int,
        content: dict[str, str],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        stop: str | int | None = None,
    ) -> bytes:
        rest = b',"logprobs":null,"finish_reason":null}]'
        if logprobs is not None or reason is not None:
            fields: dict[str, Any] = {"logprobs": logprobs, "finish_reason": reason}
            if reason is not None:
                fields["stop_reason"] = stop
            rest = b"," + orjson.dumps(fields)[1:] + b"]"
        end = self._end
        if self._continuous:
            end = b',"usage":' + orjson.dumps(usage_body(self._num_prompt, self._num_tokens)) + b"}\n\n"
        return b'%b%d,"delta":%b%b%b' % (self._start, index, orjson.dumps(content), rest, end)
