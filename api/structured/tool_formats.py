"""Tool call formats of model families (hermes, mistral, llama3_json) and detection from the chat template.

A call is a JSON object with the function's name and its arguments; families differ in the text around it. Where the
chat template does not support tools, ``for_dialect`` writes definitions, calls and results as plain text.
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
    """Tool call format of a model family.

    Attributes:
        name: value of ``--tool-call-parser``.
        trigger: text that opens calls inside free text.
        opening: the trigger and all text up to the first call.
        arguments_key: the key beside ``name``.
        separator: between calls after one opening; None if each call has its own opening.
        closing: after the last call of an opening.
        only_at_start: a call is the whole answer; the trigger later in a text opens none, and there is at most one
            call.
        short_ids: the chat template accepts only call ids of nine letters and digits.
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
    """Tool support of one model.

    Attributes:
        format: its tool call format.
        by_template: whether the chat template renders tools, calls and results; if not, ``for_dialect`` writes them
            into the messages as text.
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
_PROBE_MESSAGE: dict[str, Any] = {"role": "user", "content": "Probe."}
_PROBE_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "probe0000", "type": "function", "function": {"name": _PROBE_NAME, "arguments": {"probe": 1}}}
    ],
}
# The probe call as each family's templates render it, tried in this order.
_CALL_PATTERNS = {
    "mistral": re.compile(r"\[TOOL_CALLS\](?!\s*probe_tool)"),  # not the later form, name[ARGS]{...}
    "hermes": re.compile(r"<tool_call>\s*\{[^<]*probe_tool"),
    "llama3_json": re.compile(r'\{"name": ?"probe_tool", ?"parameters": ?\{'),
}


def dialect_of(tokenizer: Tokenizer, parser: str) -> Dialect:
    """Detect the tool call format of a chat template by rendering a probe call.

    A template that drops tools, or renders calls in no format of ``FORMATS``, gets the generic dialect: the system
    message describes the tools and the call format in plain text.

    Args:
        parser: name of a format to use whatever the template renders, or ``auto`` (``--tool-call-parser``).
    """
    if parser == "generic" or _PROBE_NAME not in _render(tokenizer, [_PROBE_MESSAGE]):
        return Dialect(FORMATS["generic" if parser == "auto" else parser], by_template=False)
    if parser != "auto":
        return Dialect(FORMATS[parser], by_template=True)
    rendered = _render(tokenizer, [_PROBE_MESSAGE, _PROBE_CALL])
    found = next((name for name, pattern in _CALL_PATTERNS.items() if pattern.search(rendered)), "generic")
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
    """Return the messages for the dialect's chat template.

    Without template support, definitions are appended to the system message (added if missing), calls to the
    assistant's text, and results become user messages.
    """
    if dialect.by_template:
        return list(messages)
    plain: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and after_result:
            # Consecutive results share a message: many templates require alternating roles.
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
    call_texts = [_call_text(call["function"], form) for call in calls]
    text = "\n".join(form.opening + call + form.closing for call in call_texts)
    if form.separator is not None:
        text = form.opening + form.separator.join(call_texts) + form.closing
    lead = f"{message['content']}\n" if message["content"] else ""
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": lead + text}


def _call_text(function: dict[str, Any], form: ToolFormat) -> str:
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
