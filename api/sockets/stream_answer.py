"""Stream answer: converts the chunks of a chat or a completion to the events of a ``/v1/stream`` request."""

from __future__ import annotations

from typing import Any

import orjson

from ..exact_json import dumps_exact, loads_exact

_FINISH = ("finish_reason", "stop_reason")


class StreamAnswer:
    """Converts chunks to ``token`` events, and keeps the message of the first choice for the next turn of the chat.

    Args:
        request_id: id that the client has given the request.

    Attributes:
        is_kept: whether a next turn may continue from this answer: it has ended, or the client has cancelled it.
    """

    def __init__(self, request_id: str) -> None:
        self.is_kept = False
        self._id = request_id
        self._response_id: str | None = None
        self._finishes: dict[int, dict[str, Any]] = {}
        self._usage: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None
        self._text: list[str] = []
        self._thought: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def take(self, data: bytes) -> list[bytes]:
        """Process a chunk. Returns its events."""
        chunk = loads_exact(data)
        if "error" in chunk:
            self._error = chunk["error"]
            return []
        self._response_id = chunk["id"]
        self._usage = chunk.get("usage") or self._usage
        self.is_kept = self._usage is not None
        return [event for choice in chunk["choices"] for event in self._events(choice)]

    def cancel(self) -> None:
        """End the answer, because the client has cancelled it."""
        self.is_kept = True
        self._finishes = {0: {"finish_reason": "cancelled", "stop_reason": None}}

    def message(self) -> dict[str, Any]:
        """Return the answer as a message of the assistant."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._text)}
        if self._thought:
            message["reasoning_content"] = "".join(self._thought)
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return message

    def last_event(self) -> bytes:
        """Return ``done``, or ``error`` if the server has cut the answer off."""
        if self._error is not None:
            return orjson.dumps({"type": "error", "id": self._id, "status": 500, "error": self._error})
        choices = [{"index": index, **self._finishes[index]} for index in sorted(self._finishes)]
        more = {"finish_reason": choices[0]["finish_reason"] if choices else None, "choices": choices}
        done = {"type": "done", "id": self._id, "response_id": self._response_id, **more, "usage": self._usage}
        return orjson.dumps(done)

    def _events(self, choice: dict[str, Any]) -> list[bytes]:
        index, delta = choice["index"], choice.get("delta", {})
        text = delta.get("content") if "delta" in choice else choice["text"]
        if choice.get("finish_reason") is not None:
            self._finishes[index] = {name: choice.get(name) for name in _FINISH}
        if index == 0:
            self._collect(text, delta)
        found = {
            "text": text,
            "token_ids": choice.get("token_ids"),
            "logprobs": choice.get("logprobs"),
            "prompt_token_ids": choice.get("prompt_token_ids"),
            "prompt_logprobs": choice.get("prompt_logprobs"),
            "field_probabilities": choice.get("field_probabilities"),
            **{name: delta.get(name) for name in ("reasoning_content", "tool_calls")},
        }
        told = {name: value for name, value in found.items() if value}
        return [dumps_exact({"type": "token", "id": self._id, "index": index, **told})] if told else []

    def _collect(self, text: str | None, delta: dict[str, Any]) -> None:
        if text:
            self._text.append(text)
        if thought := delta.get("reasoning_content"):
            self._thought.append(thought)
        for piece in delta.get("tool_calls") or ():
            call = self._calls.setdefault(piece["index"], {"id": piece.get("id"), "type": "function"})
            kind = "custom" if "custom" in piece else "function"
            call["type"] = kind
            body = call.setdefault(kind, {})
            for name, value in piece[kind].items():
                body[name] = body.get(name, "") + value
