"""Ollama chat: translates Ollama's bodies to chats and completions, and field names in errors back to Ollama's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ...engine.errors import RequestError
from ..generate.field_names import FieldNames
from ..protocol.chat import ChatRequest
from ..protocol.completions import CompletionRequest
from .ollama_request import OllamaChatRequest, OllamaFields, OllamaGenerateRequest, OllamaMessage

_OPTIONS = r"temperature|top_k|top_p|min_p|seed|stop|presence_penalty|frequency_penalty"
_MOST_QUOTED = 128


def field_names(body: OllamaFields) -> FieldNames:
    """Return the translation from the field names of a chat or a completion to the names in this request."""
    patterns = [
        (r"^(response_format|guided_json)\b(\.json_schema)?(\.schema)?", "format"),
        (r"^max_tokens$", "options.num_predict"),
        (r"^repetition_penalty$", "options.repeat_penalty"),
        (rf"^({_OPTIONS})$", r"options.\1"),
        (r"^(reasoning_effort|enable_thinking)$", "think"),
    ]
    if isinstance(body, OllamaGenerateRequest):
        patterns.append((r"^messages\b.*", "prompt"))
    parts: dict[str, str | None] = {"response_format": "format", "json_schema": None, "schema": None}
    return FieldNames(*patterns, parts=parts)


def as_chat(body: OllamaChatRequest | OllamaGenerateRequest) -> ChatRequest:
    """Translate a request to a chat. As in Ollama, an answer continues a last message of the assistant.

    Raises:
        RequestValidationError: a part of the body is malformed.
        RequestError: the result of a tool does not belong to a call, or the arguments of a call are nested too deeply.
    """
    fields = {**_shared(body), "messages": _messages(body)}
    if isinstance(body, OllamaChatRequest):
        last = body.messages[-1]
        fields["tools"] = body.tools
        fields["continue_final_message"] = last.role == "assistant" and bool(last.content) and not last.tool_calls
    if isinstance(body.think, bool):
        fields["enable_thinking"] = body.think
    elif body.think is not None:
        fields["reasoning_effort"] = body.think
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    with field_names(body).naming_invalid():
        return ChatRequest.model_validate(fields)


def as_completion(body: OllamaGenerateRequest, max_tokens: int) -> CompletionRequest:
    """Translate a request with ``raw``, whose prompt is used unchanged, to a completion.

    Raises RequestValidationError.

    Args:
        max_tokens: largest number of tokens of the answer, if the request does not set one.
    """
    fields = {"max_tokens": max_tokens, **_shared(body), "prompt": body.prompt, "logprobs": body.num_logprobs}
    with field_names(body).naming_invalid():
        return CompletionRequest.model_validate(fields)


def _shared(body: OllamaFields) -> dict[str, Any]:
    fields = {"model": body.model, "stream": body.stream, **body.options.chat_fields}
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format != "":
        fields["field_probabilities"] = body.field_probabilities
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
    return fields


def _messages(body: OllamaChatRequest | OllamaGenerateRequest) -> list[dict[str, Any]]:
    if isinstance(body, OllamaChatRequest):
        return list(_conversation(body.messages))
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": body.prompt}]


def _conversation(messages: Iterable[OllamaMessage]) -> Iterable[dict[str, Any]]:
    """Yield the messages of a chat.

    A call without an id gets one from its place, so it is the same in every request.
    """
    waiting: list[tuple[str, str]] = []  # Name and id of each call without a result.
    for number, message in enumerate(messages):
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            # Ollama's clients send "" for a call without text. A template may write that as a text.
            fields["content"] = message.content or None
            ids = [call.id or f"{number:04d}{at:05d}" for at, call in enumerate(message.tool_calls)]
            waiting = [(call.function.name, each) for call, each in zip(message.tool_calls, ids, strict=True)]
            calls = zip(message.tool_calls, ids, strict=True)
            fields["tool_calls"] = [
                {"id": each, "function": {"name": call.function.name, "arguments": _json(call.function.arguments)}}
                for call, each in calls
            ]
        if message.thinking:
            fields["reasoning_content"] = message.thinking
        if message.role == "tool":
            fields["tool_call_id"] = _answered(message, number, waiting)
        yield fields


def _answered(message: OllamaMessage, number: int, waiting: list[tuple[str, str]]) -> str:
    """Return the id of the call to which a result belongs, and remove the call from the waiting ones."""
    if message.tool_call_id is not None:
        waiting[:] = [each for each in waiting if each[1] != message.tool_call_id]
        return message.tool_call_id
    named = [each for each in waiting if message.tool_name in (None, each[0])]
    if not named:
        param = f"messages[{number}].tool_name"
        what = "" if message.tool_name is None else f" of '{message.tool_name[:_MOST_QUOTED]}'"
        raise RequestError(f"'{param}' does not match a call{what} before it that waits for a result.", param=param)
    waiting.remove(named[0])
    return named[0][1]


def _json(value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        problem = "'messages' holds a call whose arguments are nested too deeply."
        raise RequestError(problem, param="messages") from None
