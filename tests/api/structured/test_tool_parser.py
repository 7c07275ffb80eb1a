"""Tool calls out of text, in every format, cut into pieces anywhere and cut off anywhere."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats

from rootgraft.api.protocol.tools import Function, NamedChoice, Tool
from rootgraft.api.structured.tool_formats import FORMATS
from rootgraft.api.structured.tool_grammar import tool_output_format
from rootgraft.api.structured.tool_parser import ToolParser, arguments_json, read_calls
from rootgraft.api.structured.tool_plan import Arguments, CallStart, Content, Event, ToolPlan

TOOLS = [Tool(type="function", function=Function(name=name)) for name in ("f", "get-weather.v2", "Z_9")]
NAMES = [tool.function.name for tool in TOOLS]
IN_JSON = [name for name, form in FORMATS.items() if form.style == "json"]
NAMED = NamedChoice.model_validate({"type": "function", "function": {"name": "f"}})


def plan_for(form: str, choice: Any = "auto", *, parallel: bool = True) -> ToolPlan:
    output_format = tool_output_format(TOOLS, choice, FORMATS[form], None, parallel=parallel)
    assert output_format is not None and output_format.tools is not None
    return output_format.tools


def joined(events: list[Event]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and (name, arguments) of each call. Events must come in order: a call's arguments after its start."""
    content, calls = "", []
    for event in events:
        match event:
            case Content():
                content += event.text
            case CallStart():
                assert event.index == len(calls)
                calls.append((event.name, ""))
            case Arguments():
                assert event.index == len(calls) - 1 and event.text
                name, arguments = calls[-1]
                calls[-1] = name, arguments + event.text
    return content, calls


def written(form: str, content: str, calls: list[tuple[str, str]]) -> str:
    """Text as the grammar of the format makes it."""
    spec = FORMATS[form]
    if not calls:
        return spec.content_opening + content
    if content and spec.preamble is not None:
        content = spec.preamble[0] + content + spec.preamble[1]
    if content and spec.recipient_mark:
        content = spec.content_opening + content + (spec.separator or "")
    return content + spec.calls(calls)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\{}[]<>/é \n'), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.builds(
    lambda value, indent: json.dumps(value, indent=indent),
    st.dictionaries(st.text(max_size=4), JSON, max_size=4),
    st.sampled_from([None, 1]),
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), max_size=3)
WORDS = st.text(st.sampled_from('ab <>{"n[T'), max_size=12)


def pieces(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


@pytest.mark.parametrize("form", IN_JSON)
@settings(max_examples=repeats(50), deadline=None)
@given(content=WORDS, calls=CALLS, cuts=st.lists(st.integers(0, 1 << 20), max_size=30), every=st.booleans())
def test_what_the_grammar_writes_is_read_back(
    form: str, content: str, calls: list[tuple[str, str]], cuts: list[int], every: bool
) -> None:
    if FORMATS[form].single:
        calls = calls[:1]
    if FORMATS[form].only_at_start and calls:
        content = ""
    text = written(form, content, calls)
    parser = ToolParser(plan_for(form))
    events = [event for piece in (list(text) if every else pieces(text, cuts)) for event in parser.push(piece)]
    found, found_calls = joined(events + parser.finish())
    assert found == (content.rstrip() if calls and FORMATS[form].preamble is None else content)
    assert found_calls == calls
    whole, whole_calls = read_calls(plan_for(form), text)
    assert (whole, [(call.name, call.arguments) for call in whole_calls]) == (found, found_calls)


@pytest.mark.parametrize("form", IN_JSON)
@settings(max_examples=repeats(40), deadline=None)
@given(calls=CALLS.filter(bool), end=st.integers(0, 1 << 20))
def test_an_answer_that_is_cut_off(form: str, calls: list[tuple[str, str]], end: int) -> None:
    calls = calls[:1] if FORMATS[form].single else calls
    text = written(form, "", calls)
    _, found = read_calls(plan_for(form), text[: end % len(text)])
    assert len(found) <= len(calls)
    for call, (name, arguments) in zip(found, calls, strict=False):
        assert call.name == name and arguments.startswith(call.arguments)
    for call, (_, arguments) in zip(found[:-1], calls, strict=False):
        assert call.arguments == arguments


@settings(max_examples=repeats(100), deadline=None)
@given(
    calls=CALLS.filter(bool),
    cuts=st.lists(st.integers(0, 1 << 20), max_size=20),
    space=st.sampled_from(["", " ", "\n "]),
)
def test_forced_calls_with_any_white_space(calls: list[tuple[str, str]], cuts: list[int], space: str) -> None:
    items = [
        f'{{{space}"name"{space}:{space}"{name}"{space},{space}"arguments"{space}:{space}{arguments}{space}}}'
        for name, arguments in calls
    ]
    for text, expected in (
        (f"[{space}{f'{space},{space}'.join(items)}{space}]", calls),
        (items[0], calls[:1]),
    ):
        parser = ToolParser(plan_for("hermes", "required"))
        events = [event for piece in pieces(text, cuts) for event in parser.push(piece)]
        assert joined(events + parser.finish()) == ("", expected)


@given(arguments=ARGUMENTS, cuts=st.lists(st.integers(0, 1 << 20), max_size=20))
def test_a_named_call_is_its_arguments(arguments: str, cuts: list[int]) -> None:
    parser = ToolParser(plan_for("mistral", NAMED))
    events = [event for piece in pieces(arguments, cuts) for event in parser.push(piece)]
    assert joined(events + parser.finish()) == ("", [("f", arguments)])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call> is a tag",
        "<tool_call>\n{}</tool_call>",
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        "<tool_call>" + "x" * 5_000,
        '<tool_call>\n{"name": "f", "arguments": {}}!</tool_call>x',
        "<tool_call>" * 500,
        '[{"name": "f", "arguments": }]]]',
    ],
)
def test_text_that_follows_no_grammar_ends_somehow(text: str) -> None:
    for form in FORMATS:
        for choice in ("auto", "required", NAMED):
            read_calls(plan_for(form, choice), text)


def test_text_beside_calls() -> None:
    call = written("hermes", "", [("f", "{}")])
    assert joined(ToolParser(plan_for("hermes")).push(f"Let me see.\n\n{call}\n\n{call} \n"))[0] == "Let me see."
    content, calls = read_calls(plan_for("hermes"), f"\n{call} So, {call}\nthen \n")
    assert (content, len(calls)) == ("So,\nthen \n", 2)


def test_text_is_not_held_back_longer_than_needed() -> None:
    parser = ToolParser(plan_for("hermes"))
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" <tool") == []
    assert parser.push("box>") == [Content(" <toolbox>")]
    start, arguments = parser.push('<tool_call>\n{"name": "f", "arguments": {"a')
    assert isinstance(start, CallStart) and start.id.startswith("call_")
    assert arguments == Arguments(0, '{"a')
    assert parser.push("b") == [Arguments(0, "b")]


@pytest.mark.parametrize("value", ["1e400", f"1{'0' * 5000}", '"\\ud800"', "123456789012345678901", "-0"])
def test_whole_arguments_stay_as_they_were_written(value: str) -> None:
    text = f'{{"n": {value}}}'
    assert orjson.dumps(arguments_json(text)).decode() == text
    assert orjson.dumps(arguments_json(text[:-1])).decode() == text


def test_ids_that_mistral_templates_take() -> None:
    _, [call, other] = read_calls(plan_for("mistral"), written("mistral", "", [("f", "{}")] * 2))
    assert len(call.id) == 9 and call.id.isalnum() and call.id != other.id
