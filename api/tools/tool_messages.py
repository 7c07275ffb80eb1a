"""Conversations with tools for a chat template that knows none: definitions, calls and results become plain text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson

from .tool_formats import Dialect, ToolFormat

_INTRODUCTION = (
    "You can call functions. These are their definitions, one JSON object a line:\n{definitions}\n\n"
    "To call a function, write nothing but its name and its arguments in this form:\n{example}"
)


def for_dialect(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], dialect: Dialect
) -> list[dict[str, Any]]:
    """The messages as the dialect's chat template takes them.

    Definitions go to the end of the system message, which is made if there is none; calls into the text of the
    assistant's message; results into messages of the user.
    """
    if dialect.by_template:
        return list(messages)
    plain: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and after_result:
            # Results that follow each other share a message: many templates want the roles to alternate.
            plain[-1]["content"] += "\n" + _result(message)
        elif is_result:
            plain.append({"role": "user", "content": _result(message)})
        else:
            plain.append(_with_calls(message, dialect.format))
        after_result = is_result
    return _with_definitions(plain, tools, dialect.format) if tools else plain


def _result(message: dict[str, Any]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _with_calls(message: dict[str, Any], form: ToolFormat) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [_written(call["function"], form) for call in calls]
    text = "\n".join(form.opening + call + form.closing for call in written)
    if form.separator is not None:
        text = form.opening + form.separator.join(written) + form.closing
    lead = f"{message['content']}\n" if message["content"] else ""
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": lead + text}


def _written(function: dict[str, Any], form: ToolFormat) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return f"{form.head(function['name'])}{text}}}"


def _with_definitions(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], form: ToolFormat
) -> list[dict[str, Any]]:
    definitions = "\n".join(json.dumps(tool["function"], ensure_ascii=False, separators=(",", ":")) for tool in tools)
    example = f"{form.opening}{form.head('NAME')}{{...}}}}{form.closing}"
    text = _INTRODUCTION.format(definitions=definitions, example=example)
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
