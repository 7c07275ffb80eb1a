"""Formats and prompts of published chat templates that we have not written: those in llama.cpp's sources.

``support.api.published_templates`` says in our words what each model writes. The same cases with templates of our own
are in `tests/api/structured`, for runs in which nothing is downloaded.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.api.published_templates import (
    BEFORE,
    BOS,
    CALLS,
    EOS,
    PUBLISHED,
    SINGLE,
    WRITTEN,
    PublishedTemplate,
)
from transformers.utils.chat_template_utils import render_jinja_template

from rootgraft.api.generate.chat_prompt import with_known_roles
from rootgraft.api.protocol.chat import ChatRequest
from rootgraft.api.protocol.chat_messages import for_template
from rootgraft.api.protocol.tools import Function, Tool
from rootgraft.api.structured.tool_dialects import (
    Dialect,
    definitions_for,
    dialect_of,
    for_dialect,
    without_second_end,
)
from rootgraft.api.structured.tool_formats import ALIASES
from rootgraft.api.structured.tool_grammar import tool_output_format
from rootgraft.api.structured.tool_parser import read_calls
from rootgraft.engine.errors import RequestError
from rootgraft.engine.text.reasoning_formats import reasoning_format_of
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.vocabulary import Vocabulary

pytestmark = pytest.mark.heavy

ENDING = 256
BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b"</s>"), frozenset({ENDING}), (ENDING,), 257)
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "days": {"type": "integer", "description": "How long."},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    Tool(type="function", function=Function(name=name, description=f"About {name}.", parameters=PARAMETERS))
    for name, _ in CALLS
]
DEFINITIONS = [tool.for_template() for tool in TOOLS]
QUESTION = {"role": "user", "content": "<question 1>"}


@cache
def template(models: Path, name: str) -> PublishedTemplate:
    return PublishedTemplate(models, name)


@cache
def dialect(models: Path, name: str) -> Dialect:
    return dialect_of(template(models, name), "auto")  # type: ignore[arg-type]


def num_calls(name: str) -> int:
    return 1 if PUBLISHED[name].calls in SINGLE else 2


def test_every_template_has_a_row(llama_cpp_models: Path) -> None:
    assert sorted(path.stem for path in (llama_cpp_models / "templates").glob("*.jinja")) == sorted(PUBLISHED)


def test_how_many_have_a_format_of_their_own(llama_cpp_models: Path) -> None:
    found = Counter(dialect(llama_cpp_models, name).format.name for name in PUBLISHED)
    without = [name for name, row in PUBLISHED.items() if row.reason]
    assert found["generic"] == len(without) == 6
    assert (found["probed"], found.total()) == (12, 70)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_format_of_calls(llama_cpp_models: Path, name: str) -> None:
    """It writes what the model writes, its grammar lets that through, and its parser reads it."""
    row, found = PUBLISHED[name], dialect(llama_cpp_models, name)
    form, written, expected = found.format, WRITTEN[row.calls], list(CALLS[: num_calls(name)])
    names = ("generic", "mistral_nemo", "mistral_args", "mistral_call_id", *ALIASES)
    assert form.name == row.calls or form.option == row.calls or (form.name == "probed" and row.calls not in names)
    assert form.calls(expected) == written
    answer = tool_output_format(TOOLS, "auto", form, None, parallel=True)
    assert answer is not None and answer.tools is not None
    grammar = compile(answer.spec, BYTES)
    before = BEFORE.get(row.calls, "Said.")
    for lead in ("", *([before] if before else [])):
        matcher = grammar.matcher()
        assert all(map(matcher.accept, (lead + written).encode())) and matcher.can_end
        content, calls = read_calls(answer.tools, lead + written)
        assert content == ("Said." if lead else "")
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [
            (each, json.loads(arguments)) for each, arguments in expected
        ]
    if before is None and form.only_at_start:
        assert read_calls(answer.tools, "Said. " + written) == ("Said. " + written, [])


@pytest.mark.parametrize("name", [name for name, row in PUBLISHED.items() if row.shown])
def test_the_template_renders_calls_so(llama_cpp_models: Path, name: str) -> None:
    number = num_calls(name)
    messages = [QUESTION, called(*range(1, number + 1))]
    text = prompt(llama_cpp_models, name, messages, add_generation_prompt=False)
    # Some templates write the client's ids, and some write them behind the arguments, where no model does.
    text = re.sub(r', "id": "call0000\d"', "", text)
    for each in range(number):
        text = text.replace(f"call0000{each + 1}", str(each))
    assert WRITTEN[PUBLISHED[name].calls] in text


@pytest.mark.parametrize("name", PUBLISHED)
def test_marks_of_thoughts_and_where_prompts_stand(llama_cpp_models: Path, name: str) -> None:
    row, tokenizer = PUBLISHED[name], template(llama_cpp_models, name)
    found = reasoning_format_of(tokenizer, "auto")  # type: ignore[arg-type]
    assert (None if found is None else (found.start, found.end)) == row.thought
    if found is None:
        return
    stands = ""
    for switch in (None, True, False):
        kwargs = {} if switch is None else {"enable_thinking": switch, "thinking": switch}
        tools = DEFINITIONS if tokenizer.needs_tools else None
        text = tokenizer.render_chat([QUESTION], add_generation_prompt=True, tools=tools, kwargs=kwargs)
        stands += {None: "d", True: "i", False: "b"}[found.is_open_at(text)]
    assert stands == row.stands


def called(*numbers: int, **fields: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(CALLS, 1)
        if n in numbers
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


def result(number: int, content: Any = None) -> dict[str, Any]:
    content = f"<result {number}>" if content is None else content
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": content}


def said(role: str, number: int, **fields: Any) -> dict[str, Any]:
    kind = {"user": "question", "assistant": "answer"}.get(role, "rule")
    return {"role": role, "content": f"<{kind} {number}>", **fields}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


THOUGHT = "a thought of an earlier turn"
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [QUESTION],
    "instructions": [said("system", 1), QUESTION],
    "developer": [said("developer", 1), QUESTION],
    "two instructions": [said("system", 1), said("system", 2), QUESTION],
    "late instructions": [said("system", 1), QUESTION, said("assistant", 1), said("system", 2), said("user", 2)],
    "late developer": [QUESTION, said("assistant", 1), said("developer", 2), said("user", 2)],
    "null beside a call": [QUESTION, called(1), result(1)],
    "no content beside a call": [QUESTION, {k: v for k, v in called(1).items() if k != "content"}, result(1)],
    "empty text beside a call": [QUESTION, called(1, content=""), result(1)],
    "text beside a call": [QUESTION, called(1, content="<words 1>"), result(1)],
    "two calls": [QUESTION, called(1, 2), result(1), result(2)],
    "two calls and text": [QUESTION, called(1, 2, content="<words 1>"), result(1), result(2)],
    "results out of order": [QUESTION, called(1, 2), result(2), result(1), said("assistant", 1), said("user", 2)],
    "content in parts": [
        {"role": "system", "content": parts("<rule 1>")},
        {"role": "user", "content": parts("<question ", "1>")},
        called(1, content=[]),
        result(1, parts("<result ", "1>")),
    ],
    "rounds": [QUESTION, called(1), result(1), called(2), result(2), said("assistant", 1), said("user", 2)],
    "question after results": [QUESTION, called(1), result(1), said("user", 2)],
    "thought": [QUESTION, said("assistant", 1, reasoning_content=THOUGHT), said("user", 2)],
    "thought before a call": [QUESTION, called(1, reasoning=THOUGHT), result(1)],
    "questions": [QUESTION, said("user", 2)],
    "answers": [QUESTION, said("assistant", 1), said("assistant", 2), said("user", 2)],
    "answer first": [said("assistant", 1), said("user", 2)],
    "instructions alone": [said("system", 1)],
    "result in JSON": [QUESTION, called(1), result(1, '{"<result 1>": [1, null]}')],
}
BARE_TOOLS = [
    {"type": "function", "function": {"name": "lookup", "description": "", "parameters": parameters}}
    for parameters in (
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}},
        {"type": "object", "properties": {"a": {"type": ["integer", "null"], "description": "A."}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": ["x", "y"]}, "description": "A."}}},
        {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"const": 1}}}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "string"}}},
    )
]
# Templates that leave out a text beside calls and take no two messages of the assistant in a row.
LOSING = ("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407")
# Templates that write a text beside calls behind them.
BEHIND = ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "google-gemma-4-31B-it-interleaved")
# Templates that write the instructions into the last question.
MOVING = ("mistralai-Mistral-Nemo-Instruct-2407",)
# Templates that our environment renders and transformers' does not, and a word of its error.
NOT_THEIRS = {
    "Kimi-K2-Instruct": "append",
    "Kimi-K2-Thinking": "append",
    "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
    "llama-cpp-deepseek-r1": "generator is not JSON serializable",
}


def shown(models: Path, name: str, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages as a route gets them ready for a template, and as the dialect passes them on."""
    chat = ChatRequest.model_validate({"messages": messages})
    ready = with_known_roles(for_template(chat.messages), template(models, name))  # type: ignore[arg-type]
    tools = definitions(models, name, messages)
    return ready, for_dialect(ready, tools, dialect(models, name))


def definitions(models: Path, name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    has_calls = any("tool_calls" in message for message in messages)
    return DEFINITIONS if has_calls or template(models, name).needs_tools else []


def prompt(models: Path, name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """The prompt of a conversation, as routes render it."""
    found, tools = dialect(models, name), definitions(models, name, messages)
    text = template(models, name).render_chat(
        shown(models, name, messages)[1], tools=definitions_for(tools, found), **options
    )
    return without_second_end(text, found)


def theirs(models: Path, name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    source = template(models, name).source
    [text], _ = render_jinja_template(
        [messages], tools or None, chat_template=source, add_generation_prompt=True, bos_token=BOS, eos_token=EOS
    )
    return str(text)


@pytest.mark.parametrize("name", PUBLISHED)
def test_prompts_have_every_text_once_and_in_its_place(llama_cpp_models: Path, name: str) -> None:
    for label, messages in CONVERSATIONS.items():
        text = prompt(llama_cpp_models, name, messages)
        expected = [mark for message in in_order(messages, name) for mark in marks_in(message)]
        if name in LOSING:
            expected = [each for each in expected if not each.startswith("<words")]
        begin, places = text.find("<question 1>"), list[int]()
        for each in expected:
            # Names of cities may be examples in a template's own instructions.
            places.append(text.find(each, 0 if each[0] == "<" else begin))
        assert -1 not in places, (label, expected, text)
        assert places == sorted(places) or (name in BEHIND and "text" in label), (label, expected, text)
        assert all(text.count(each) == 1 for each in expected if each[0] == "<"), (label, text)
        assert "Undefined" not in text, (label, text)
        # Some templates begin each message with this token.
        assert text.count(BOS) <= 1 or text.count(BOS) >= len(messages), (label, text)


def in_order(messages: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the messages in the order in which a prompt has their texts.

    Results are in the order of their calls, and where an answer has one call, each call is in front of its result.
    """
    first = next((at for at, each in enumerate(messages) if len(each.get("tool_calls", ())) > 1), None)
    if first is None:
        return [each for each in messages if name not in MOVING or each["role"] != "system"]
    call, results = messages[first], sorted(messages[first + 1 : first + 3], key=lambda each: str(each["tool_call_id"]))
    turns = [call, *results]
    if PUBLISHED[name].calls in SINGLE:
        turns = [{**call, "tool_calls": call["tool_calls"][:1]}, results[0], called(2), results[1]]
    return [*messages[:first], *turns, *messages[first + 3 :]]


def marks_in(message: dict[str, Any]) -> list[str]:
    """Return the texts of a message that a prompt must have."""
    content = message.get("content")
    text = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
    calls = [json.loads(call["function"]["arguments"])["city"] for call in message.get("tool_calls", ())]
    return [*re.findall(r"<[a-z]+ \d>", text), *calls]


@pytest.mark.parametrize("name", PUBLISHED)
def test_prompts_equal_those_of_transformers(llama_cpp_models: Path, name: str) -> None:
    """Byte by byte, of each conversation that the template takes as it is."""
    found, compared = dialect(llama_cpp_models, name), 0
    for label, messages in CONVERSATIONS.items():
        ready, passed = shown(llama_cpp_models, name, messages)
        tools = definitions(llama_cpp_models, name, messages)
        if passed != ready or (tools and not found.by_template):
            continue
        ours = prompt(llama_cpp_models, name, messages)
        try:
            expected = theirs(llama_cpp_models, name, ready, tools)
        except Exception as error:
            assert NOT_THEIRS.get(name, name) in str(error), (label, error)
            continue
        assert ours == expected, label
        compared += 1
    assert compared >= 4 or name in NOT_THEIRS or not found.by_template, compared


@pytest.mark.parametrize("name", [name for name, row in PUBLISHED.items() if not row.reason])
def test_every_definition_is_taken(llama_cpp_models: Path, name: str) -> None:
    found = dialect(llama_cpp_models, name)
    for tool in BARE_TOOLS:
        messages = for_dialect([QUESTION], [tool], found)
        text = template(llama_cpp_models, name).render_chat(messages, tools=definitions_for([tool], found))
        assert "lookup" in text and "<question 1>" in text and "Undefined" not in text, (tool, text)


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_answer_goes_on(llama_cpp_models: Path, name: str) -> None:
    """What the model writes after the prompt is behind the text of the last message."""
    messages = [QUESTION, said("assistant", 1)]
    try:
        text = prompt(llama_cpp_models, name, messages, add_generation_prompt=False, continue_final_message=True)
    except RequestError as error:
        assert "cannot be continued" in str(error)
        pytest.fail(f"{name}: {error}")
    assert text.endswith("<answer 1>") and text.count("<answer 1>") == text.count("<question 1>") == 1
