"""Conversations of ``LLM.chat`` in the form for chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RequestError

Conversation = Sequence[Mapping[str, Any]]


def read_conversations(messages: Conversation | Sequence[Conversation]) -> list[list[dict[str, Any]]]:
    """Read one conversation or several, with messages in OpenAI's form.

    Texts in parts are joined to one text, and the arguments of tool calls are parsed to objects.

    Raises:
        RequestError: a message is not an object or has parts other than text, or the arguments of a call are not a JSON
            object.
    """
    _check_list(messages)
    listed = [messages] if len(messages) > 0 and isinstance(messages[0], Mapping) else messages
    return [[_message(message) for message in conversation] for conversation in listed]


def _check_list(messages: Any) -> None:
    if isinstance(messages, (str, bytes)) or not hasattr(messages, "__getitem__"):
        raise RequestError(
            f"messages must be a list of messages, or a list of such, not {type(messages).__name__}.", param="messages"
        )


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"A message must be an object, not {type(message).__name__}.", param="messages")
    found = dict(message)
    content = found.get("content")
    if content is None and "content" in found:
        found["content"] = ""
    elif isinstance(content, Sequence) and not isinstance(content, str):
        found["content"] = "\n".join(_text(part) for part in content)
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(
        f"A part of a message must be text, not {kind}: images and audio are not supported.", param="messages"
    )


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(
            f"The arguments of a call of {function.get('name')} must be a JSON object.", param="messages"
        )
    return {**call, "function": {**function, "arguments": arguments}}
