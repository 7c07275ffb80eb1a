"""Messages as clients send them, as chat templates get them: the prompt is that of transformers, byte by byte."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from jinja2 import TemplateError
from support.api.tool_templates import OTHERS, PROBED, TEMPLATES, THOUGHTS, TemplateOnly
from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

from rootgraft.api.protocol.chat import ChatRequest
from rootgraft.api.protocol.chat_messages import for_template
from rootgraft.api.structured.tool_dialects import dialect_of, for_dialect

SOURCES = {**TEMPLATES, **OTHERS, **PROBED, **{marks[0]: source for source, marks in THOUGHTS.items()}}
TOOL = {
    "type": "function",
    "function": {
        "name": "wetter",
        "description": "Wie <ist> es?",
        "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}, "required": ["ort"]},
    },
}
USER = {"role": "user", "content": "Und 'heute'?"}


def call(number: int = 0, days: int = 2) -> dict[str, Any]:
    function = {"name": "wetter", "arguments": f'{{"ort": "K\u00f6ln", "tage": {days}}}'}
    return {"id": f"aaaaaaaa{number}", "type": "function", "function": function}


def result(content: Any = "<nass>", number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "name": "wetter", "tool_call_id": f"aaaaaaaa{number}", "content": content}


def said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a question": [USER],
    "an instruction": [{"role": "system", "content": 'Be "brief".'}, USER],
    "turns": [USER, said(content="Ja."), USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}],
    "null beside calls": [USER, said(content=None, tool_calls=[call()]), result()],
    "nothing beside calls": [USER, said(tool_calls=[call()]), result()],
    "empty text beside calls": [USER, said(content="", tool_calls=[call()]), result()],
    "empty parts beside calls": [USER, said(content=[], tool_calls=[call()]), result()],
    "text beside calls": [USER, said(content="Moment.", tool_calls=[call()]), result()],
    "null calls and other nulls": [USER, said(content="Ja.", tool_calls=None, refusal=None, name=None), USER],
    "two calls": [USER, said(content=None, tool_calls=[call(), call(1)]), result(), result(number=1)],
    "a long integer": [USER, said(tool_calls=[call(days=12345678901234567890123)]), result()],
    "a result in parts": [USER, said(content=None, tool_calls=[call()]), result([{"type": "text", "text": "<nass>"}])],
    "an answer behind a result": [USER, said(content=None, tool_calls=[call()]), result(), said(content="Ja."), USER],
    "a thought": [USER, said(content="Ja.", reasoning_content="Hm.", reasoning="Hm."), USER],
}


def as_documented(messages: list[dict[str, Any]], *, arguments_as_text: bool) -> list[dict[str, Any]]:
    """The same as transformers' documentation asks for it: text content, and arguments as templates take them."""
    found = copy.deepcopy(messages)
    for message in found:
        if isinstance(content := message.get("content"), list):
            message["content"] = "".join(part["text"] for part in content)
        for each in message.get("tool_calls") or []:
            arguments = json.loads(each["function"]["arguments"])
            # Text is JSON with the spaces that models and ``tojson`` of templates write.
            text = json.dumps(arguments, ensure_ascii=False)
            each["function"]["arguments"] = text if arguments_as_text else arguments
    return _normalize_chat_messages(found)


@pytest.mark.parametrize("name", SOURCES)
def test_the_prompt_is_that_of_transformers(name: str) -> None:
    tokenizer = TemplateOnly(SOURCES[name])
    dialect = dialect_of(tokenizer, "auto")  # type: ignore[arg-type]
    compared = 0
    for title, messages in CONVERSATIONS.items():
        if not dialect.by_template and any(message.get("tool_calls") for message in messages):
            continue  # calls are text there, which transformers does not write
        tools = [TOOL] if dialect.by_template and dialect.lists_tools else None
        taken = messages
        if title == "text beside calls" and not dialect.shape.calls_beside_text:
            taken = [USER, said(content="Moment."), said(content="", tool_calls=[call()]), result()]
        elif title == "two calls" and not dialect.shape.parallel_calls:
            first, second = said(content=None, tool_calls=[call()]), said(content="", tool_calls=[call(1)])
            taken = [USER, first, result(), second, result(number=1)]
        documented = as_documented(taken, arguments_as_text=dialect.arguments_as_text)
        try:
            [theirs], _ = render_jinja_template(
                [documented], tools=tools, chat_template=SOURCES[name], add_generation_prompt=True
            )
        except (TemplateError, TypeError):
            continue  # the template wants what the conversation lacks
        chat = ChatRequest.model_validate({"messages": messages})
        shown = for_dialect(for_template(chat.messages), tools or [], dialect)
        assert tokenizer.render_chat(shown, tools=tools, add_generation_prompt=True) == theirs, title
        compared += 1
    assert compared >= (5 if dialect.by_template else 3)
