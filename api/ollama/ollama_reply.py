"""Ollama reply: a stream of JSON objects, one in each line and the last one with the counts; or one object for all.

{"model": ..., "created_at": ..., "message": {"role": "assistant", "content": "Hel"}, "done": false}
{"model": ..., "created_at": ..., "message": {...}, "done": true, "done_reason": "stop", "eval_count": ...}
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from ...engine.types import FinishReason
from ..access.caller import RequestFacts
from ..error_responses import text_body
from ..errors import ErrorReply, reply_to
from ..generate.logprob_formats import chat_logprobs, field_probabilities
from ..generate.sse import EventStream
from ..generate.streams import Deltas, ReplyEnd
from ..protocol.tools import CUSTOM_INPUT
from ..structured.output_format import OutputFormat, tool_parser
from ..structured.tool_parser import arguments_json
from ..structured.tool_plan import Arguments, CallStart, Content

if TYPE_CHECKING:
    from ...engine.serving.output_processor import Finish, TextDelta, TokenLogprob
    from ...engine.text.field_probabilities import FieldProbability

_NANOSECONDS = 1_000_000_000


class LineStream(EventStream):
    """Streaming response of lines of JSON, otherwise like ``EventStream``.

    A heartbeat is a space before the next line.
    """

    media_type = "application/x-ndjson"
    heartbeat_piece = b" "


class OllamaReply(ReplyEnd):
    """State of one answer, from its request to its end.

    Args:
        model: model name in the answer.
        is_chat: whether the answer is for ``/api/chat``; otherwise it is for ``/api/generate``.
        facts: facts about the request, such as the seconds for loading its adapter.
        output_format: the output format of the answer; tool calls in it become a field.
        num_logprobs: number of likeliest tokens with logprobs at each position; None for no logprobs.
    """

    def __init__(
        self,
        model: str,
        *,
        is_chat: bool,
        facts: RequestFacts,
        output_format: OutputFormat | None = None,
        num_logprobs: int | None = None,
    ) -> None:
        self._model, self._is_chat, self._facts = model, is_chat, facts
        self._parser = tool_parser(output_format)
        self._num_logprobs = num_logprobs
        self._began = time.perf_counter()
        # The call whose arguments are arriving.
        self._call: CallStart | None = None
        self._arguments: list[str] = []
        self._text: list[str] = []  # Pieces of the whole answer's text; the next two lists hold its other parts.
        self._thought: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[TokenLogprob] = []
        self._fields: list[FieldProbability] = []

    def take(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Add a delta. Returns its objects. A delta with a finish reason ends the answer, or sets ``failure``."""
        text, calls = self._parsed(delta)
        self._text.append(text)
        self._thought.append(delta.reasoning)
        self._calls += calls
        self._logprobs += delta.logprobs
        self._fields += delta.fields
        found = []
        if text or delta.reasoning or calls or (delta.logprobs and self._num_logprobs is not None) or delta.fields:
            fields = _field_probabilities(delta.fields)
            found.append(self._object(text, delta.reasoning, calls, delta.logprobs) | fields | {"done": False})
        if delta.finish is not None:
            self._finish = delta.finish
            if self.failure is None:
                found.append(self._object("", "", [], ()) | self._end(delta.finish))
        return found

    def body(self) -> dict[str, Any]:
        """Return the whole answer.

        Raises ``failure`` if it is set, and EngineError if the engine did not end the answer.
        """
        finish = self.ended()
        whole = self._object("".join(self._text), "".join(self._thought), self._calls, self._logprobs)
        return whole | _field_probabilities(self._fields) | self._end(finish)

    def loaded(self) -> dict[str, Any]:
        """Return the answer to a request that only asks for the model to be loaded. The model is always loaded."""
        return self._object("", "", [], ()) | {"done": True, "done_reason": "load"}

    def _parsed(self, delta: TextDelta) -> tuple[str, list[dict[str, Any]]]:
        """Return the text of a delta without calls, and the calls that it completes."""
        if self._parser is None:
            return delta.text, []
        events = self._parser.push(delta.text)
        if delta.finish is not None:
            events += self._parser.finish()
        text, calls = "", []
        for event in events:
            match event:
                case Content():
                    text += event.text
                case CallStart():
                    calls += self._end_call()
                    self._call = event
                case Arguments():
                    self._arguments.append(event.text)
        if self._call is not None and (delta.finish is not None or not self._parser.is_inside_call):
            calls += self._end_call()
        return text, calls

    def _end_call(self) -> list[dict[str, Any]]:
        call, text = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        if call is None:
            return []
        arguments = {CUSTOM_INPUT: text} if call.is_custom else arguments_json(text or "{}")
        function = {"index": call.index, "name": call.name, "arguments": arguments}
        return [{"id": call.id, "function": function}]

    def _object(
        self, text: str, thought: str, calls: list[dict[str, Any]], logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        thinking = {"thinking": thought} if thought else {}
        fields: dict[str, Any]
        if self._is_chat:
            message = {"role": "assistant", "content": text, **thinking, **({"tool_calls": calls} if calls else {})}
            fields = {"message": message}
        else:
            fields = {"response": text, **thinking}
        if logprobs and self._num_logprobs is not None:
            fields["logprobs"] = chat_logprobs(logprobs, self._num_logprobs)["content"]
        return {"model": self._model, "created_at": _now(), **fields}

    def _end(self, finish: Finish) -> dict[str, Any]:
        stats, usage = finish.stats, finish.usage
        is_cut = finish.reason is FinishReason.LENGTH or finish.ended_by_budget
        return {
            "done": True,
            "done_reason": "length" if is_cut else "stop",
            "total_duration": _nanoseconds(time.perf_counter() - self._began),
            "load_duration": _nanoseconds(self._facts.adapter_seconds or 0.0),
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": 0 if stats is None else _nanoseconds(stats.prefill),
            "eval_count": usage.completion,
            "eval_duration": 0 if stats is None else _nanoseconds(stats.decode),
        }


async def reply_lines(reply: OllamaReply, deltas: Deltas) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an answer. An error after the first line becomes a further line, which is the last one."""
    begun, held = False, b""
    try:
        async with aclosing(deltas) as stream:
            async for several in stream:
                objects = [each for delta in several for each in reply.take(delta)]
                lines = [orjson.dumps(each) + b"\n" for each in objects]
                if lines and objects[-1]["done"]:
                    held = lines.pop()
                if lines:
                    begun = True
                    yield b"".join(lines)
                if reply.failure is not None:
                    raise reply.failure
    except Exception as error:
        if not begun:
            raise
        yield error_line(reply_to(error))
    else:
        if held:
            yield held


def error_line(reply: ErrorReply) -> bytes:
    """Serialize an error as the last line of a stream."""
    return text_body(reply) + b"\n"


async def one_line(body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """Yield an object as the only line of a stream."""
    yield orjson.dumps(body) + b"\n"


def _field_probabilities(fields: Sequence[FieldProbability]) -> dict[str, Any]:
    return {"field_probabilities": field_probabilities(fields)} if fields else {}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(seconds * _NANOSECONDS)
