"""How families of models write tool calls, as data, and which of the forms a model's chat template speaks.

A call is a JSON object with the function's name and its arguments; families differ in what stands around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from ...engine.errors import RequestError

if TYPE_CHECKING:
    from ...engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    Attributes:
        name: its value of ``--tool-call-parser``.
        trigger: what opens calls in free text.
        opening: from the trigger to the first call.
        arguments_key: the key beside ``name``.
        separator: between calls of one opening; None where each call has an opening of its own.
        closing: after the last call of an opening.
        only_at_start: a call is the whole answer or none of it: text may hold the trigger further on, and there is
            never more than one call.
        short_ids: the chat template takes call ids of nine letters and digits only.
    """

    name: str
    trigger: str
    opening: str
    arguments_key: str = "arguments"
    separator: str | None = None
    closing: str = ""
    only_at_start: bool = False
    short_ids: bool = False

    def head(self, function: str) -> str:
        """A call up to its arguments, which end with ``}``."""
        return f'{{"name": "{function}", "{self.arguments_key}": '


FORMATS = {
    form.name: form
    for form in (
        ToolFormat(
            "mistral", "[TOOL_CALLS]", '[TOOL_CALLS] [', separator=", ", closing="]", short_ids=True
        ),
        ToolFormat("hermes", "<tool_call>", "<tool_call>\n", closing="\n</tool_call>"),
        ToolFormat("llama3_json", '{"name": "', "", arguments_key="parameters", only_at_start=True),
        ToolFormat("generic", "<tool_call>", "<tool_call>\n", closing="\n</tool_call>"),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dialect:
    """How tools are spoken of with one model.

    Attributes:
        format: how it writes calls.
        by_template: whether its chat template renders tools, calls and results; if not, ``messages`` writes them into
            the conversation's texts.
    """

    format: ToolFormat
    by_template: bool


_PROBE_NAME = "probe_tool"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE_NAME,
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"probe": {"type": "integer", "description": "A number."}}},
    },
}
_QUESTION: dict[str, Any] = {"role": "user", "content": "Probe."}
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "probe0000", "type": "function", "function": {"name": _PROBE_NAME, "arguments": {"probe": 1}}}
    ],
}
# The call of the probe as each family's templates render it, looked for in this order.
_MARKS = {
    "mistral": re.compile(r"\[TOOL_CALLS\](?!\s*probe_tool)"),  # not the later form, name[ARGS]{...}
    "hermes": re.compile(r"<tool_call>\s*\{[^<]*probe_tool"),
    "llama3_json": re.compile(r'\{"name": ?"probe_tool", ?"parameters": ?\{'),
}


def dialect_of(tokenizer: Tokenizer, asked: str) -> Dialect:
    """The dialect that a chat template speaks, found out by rendering a call.

    A template that drops tools, or writes calls in a form that is not in the table, gets the generic dialect: the
    model is told in plain text what to write.

    Args:
        asked: a format's name to use whatever the template writes, or ``auto``.
    """
    if asked == "generic" or _PROBE_NAME not in _render(tokenizer, [_QUESTION]):
        return Dialect(FORMATS["generic" if asked == "auto" else asked], by_template=False)
    if asked != "auto":
        return Dialect(FORMATS[asked], by_template=True)
    called = _render(tokenizer, [_QUESTION, _CALL])
    found = next((name for name, mark in _MARKS.items() if mark.search(called)), "generic")
    return Dialect(FORMATS[found], by_template=found != "generic")


def _render(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]) -> str:
    try:
        return tokenizer.render_chat(messages, add_generation_prompt=False, tools=[_PROBE_TOOL])
    except RequestError:
        return ""


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
