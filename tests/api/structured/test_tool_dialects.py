"""Which dialect a chat template speaks, by real Jinja templates in each family's manner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.api.tool_templates import OTHERS, TEMPLATES, WITHOUT_CALLS, TemplateOnly

from rootgraft.api.structured.tool_dialects import dialect_of, for_dialect
from rootgraft.api.structured.tool_formats import FORMATS

CALL = {
    "role": "assistant",
    "content": "Well.",
    "tool_calls": [{"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": {"a": "b", "n": 1}}}],
}


def dialect(source: str, parser: str = "auto") -> Any:
    return dialect_of(TemplateOnly(source), parser)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_format_is_found_by_the_call_that_the_template_writes(name: str) -> None:
    found = dialect(TEMPLATES[name])
    assert (found.format.name, found.by_template, found.calls_by_template) == (name, True, True)
    assert dialect(TEMPLATES[name], FORMATS[name].option).format.name == name


def test_there_is_a_template_for_each_format() -> None:
    assert [*TEMPLATES, "generic"] == [*FORMATS]


@pytest.mark.parametrize("name", OTHERS)
def test_other_forms_of_templates(name: str) -> None:
    family = {"python": "pythonic"}.get(name, name.partition(" ")[0])
    expected = family if family in FORMATS else "generic"
    found = dialect(OTHERS[name])
    by_template = expected != "generic" and "without definitions" not in name
    assert (found.format.name, found.by_template) == (expected, by_template)


@pytest.mark.parametrize("name", WITHOUT_CALLS)
def test_calls_that_the_template_leaves_out_are_written_as_text(name: str) -> None:
    found = dialect(WITHOUT_CALLS[name])
    assert (found.format.name, found.by_template, found.calls_by_template) == (name, True, False)
    [message] = for_dialect([CALL], [], found)
    assert message["content"] == "Well.\n" + found.format.calls([("f", '{"a":"b","n":1}')])
    assert "tool_calls" not in message


def test_arguments_as_text_for_templates_that_add_them_to_text() -> None:
    found = dialect(TEMPLATES["deepseek_v31"])
    assert found.arguments_as_text and not dialect(TEMPLATES["deepseek_v3"]).arguments_as_text
    [message] = for_dialect([CALL], [], found)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a":"b","n":1}'
    assert CALL["tool_calls"][0]["function"]["arguments"] == {"a": "b", "n": 1}  # type: ignore[index]


def test_long_integers_of_calls_that_are_written_as_text() -> None:
    """Twice over: as JSON, and in a style that is not JSON."""
    number = 12345678901234567890123
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"n": number}}}
    for parser in ("generic", "qwen3_coder"):
        found = replace(dialect(OTHERS["no tools"], parser), by_template=False)
        [message] = for_dialect([{"role": "assistant", "tool_calls": [call]}], [], found)
        assert str(number) in message["content"]


def test_an_option_chooses() -> None:
    for name, by_template in (("hermes", True), ("python", True), ("no tools", False)):
        source = (TEMPLATES | OTHERS)[name]
        for asked in ("hermes", "llama3_json", "mistral", "qwen3_coder"):
            found = dialect(source, asked)
            assert (found.format.name, found.by_template) == (asked, by_template)
        found = dialect(source, "generic")
        assert (found.format.name, found.by_template) == ("generic", False)


def test_the_template_decides_among_the_formats_of_a_parser() -> None:
    assert dialect(TEMPLATES["mistral_args"], "mistral").format.name == "mistral_args"
    assert dialect(TEMPLATES["granite_text"], "granite").format.name == "granite_text"
    assert dialect(TEMPLATES["hermes"], "granite").format.name == "granite"
    assert dialect(TEMPLATES["qwen3_coder"], "qwen3_xml").format.name == "qwen3_coder"
