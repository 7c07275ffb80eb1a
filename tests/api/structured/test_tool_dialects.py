"""Which dialect a chat template speaks, by real Jinja templates in each family's manner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.api.tool_templates import (
    KIMI_CALLS,
    OTHERS,
    PROBED,
    TEMPLATES,
    WITHOUT_CALLS,
    WITHOUT_FORMAT,
    TemplateOnly,
    kimi_turns,
)

from rootgraft.api.structured.tool_dialects import (
    Dialect,
    definitions_for,
    dialect_of,
    for_dialect,
    without_second_end,
)
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


def test_how_many_templates_have_a_format_of_their_own() -> None:
    """All but those that have a reason. Published templates are as many again, and not in this repository."""
    groups = (TEMPLATES, WITHOUT_CALLS, PROBED, OTHERS)
    sources = [(name, source) for group in groups for name, source in group.items()]
    generic = [name for name, source in sources if dialect(source).format.name == "generic"]
    assert sorted(generic) == sorted(WITHOUT_FORMAT)
    assert (len(sources), len(sources) - len(generic)) == (64, 55)


def test_there_is_a_template_for_each_format() -> None:
    assert [*TEMPLATES, "generic"] == [*FORMATS]


@pytest.mark.parametrize("name", OTHERS)
def test_other_forms_of_templates(name: str) -> None:
    family = {"python": "pythonic"}.get(name, name.partition(" ")[0])
    expected = family if family in FORMATS else "generic"
    found = dialect(OTHERS[name])
    lists_tools = "without definitions" not in name
    assert (found.format.name, found.by_template, found.lists_tools) == (expected, expected != "generic", lists_tools)


@pytest.mark.parametrize("name", WITHOUT_CALLS)
def test_calls_that_the_template_leaves_out_are_written_as_text(name: str) -> None:
    found = dialect(WITHOUT_CALLS[name])
    assert (found.format.name, found.by_template, found.calls_by_template) == (name, True, False)
    [message] = for_dialect([CALL], [], found)
    assert message["content"] == "Well.\n" + found.format.calls([("f", '{"a": "b", "n": 1}')])
    assert "tool_calls" not in message


def test_arguments_as_text_for_templates_that_add_them_to_text() -> None:
    found = dialect(TEMPLATES["deepseek_v31"])
    assert found.arguments_as_text and not dialect(TEMPLATES["deepseek_v3"]).arguments_as_text
    [message] = for_dialect([CALL], [], found)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "b", "n": 1}'
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


def told(source: str, found: Dialect, *messages: dict[str, Any], **options: Any) -> str:
    """The prompt of a conversation, as routes render it."""
    text = TemplateOnly(source).render_chat(
        for_dialect(messages, [], found), tools=[{"type": "function"}] if found.by_template else None, **options
    )
    return without_second_end(text, found)


@pytest.mark.parametrize("content", ["Well.", ""])
@pytest.mark.parametrize("source", [kimi_turns(KIMI_CALLS), kimi_turns()], ids=["calls", "no calls"])
def test_a_conversation_has_the_calls_as_the_model_has_written_them(source: str, content: str) -> None:
    """Kimi K3's calls begin with the end of the text, which the template writes behind every text."""
    found = dialect(source, "kimi_k3")
    assert (found.by_template, found.calls_by_template) == (True, bool(KIMI_CALLS in source))
    for by_template in {found.by_template, found.calls_by_template}:
        own = replace(found, by_template=by_template)
        asked = {"role": "user", "content": "hi"}
        prompt = told(source, own, asked, add_generation_prompt=True, kwargs={"enable_thinking": False})
        answer = content + FORMATS["kimi_k3"].calls([("f", '{"a": "b", "n": 1}')])
        turns = [asked, {**CALL, "content": content}, {"role": "tool", "tool_call_id": "abcdef123", "content": "x"}]
        text = told(source, own, *turns, add_generation_prompt=False)
        assert text.startswith(f"{prompt}{answer}<|close|>message<|sep|>"), text


STRICT = (
    "{% for tool in tools or [] %}{% for name, value in tool.function.parameters.properties | items %}"
    "{{ name + ': ' + value.type + value.description }}{% endfor %}{% endfor %}"
)


def test_parameters_get_what_a_template_needs() -> None:
    """Hermes 3's and Command R+'s templates need a type and a description of each parameter."""
    bare = dialect(TEMPLATES["hermes"])
    found = dialect(TEMPLATES["hermes"].replace("{% if tools %}", STRICT + "{% if tools %}", 1))
    assert (bare.takes_bare_parameters, found.takes_bare_parameters) == (True, False)
    properties: dict[str, Any] = {
        "a": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
        "b": {"type": "string", "description": "B."},
        "c": {"enum": ["x", 1]},
        "d": {"type": "array", "items": {"type": "object", "properties": {"e": {}}}},
        "f": {"type": "null"},
        "g": True,
        "i": {"$ref": "#/$defs/I"},
        "h": {"type": ["boolean", "null"], "description": "H."},
    }
    parameters = {"type": "object", "properties": properties, "$defs": {"I": {"type": "object", "required": ["j"]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert definitions_for([tool], bare) == [tool]
    [shown] = definitions_for([tool], found) or []
    assert shown["function"]["parameters"]["properties"] == {
        "a": {"type": "number", "description": "", **properties["a"]},
        "b": properties["b"],
        "c": {"type": "string", "description": "", "enum": ["x", 1]},
        "d": {
            "type": "array",
            "description": "",
            "items": {
                "type": "object",
                "description": "",
                "properties": {"e": {"type": "string", "description": ""}},
                "additionalProperties": {},
            },
        },
        "f": {"type": "null", "description": ""},
        "g": True,
        "h": {"type": "boolean", "description": "H."},
        "i": {"type": "object", "description": "", "$ref": "#/$defs/I", "additionalProperties": {}},
    }
    assert properties["a"] == {"anyOf": [{"type": "null"}, {"type": "integer"}]}
    assert definitions_for([], found) is None is definitions_for([tool], dialect(OTHERS["no tools"]))


def test_definitions_alone_are_written_as_text_for_a_template_without_them() -> None:
    """DeepSeek V3.1's renders calls and results, as the model has learnt them, and no definitions."""
    source = OTHERS["deepseek_v3 without definitions"]
    found = dialect(source)
    tool = {"type": "function", "function": {"name": "f", "description": "Does.", "parameters": {"type": "object"}}}
    asked = {"role": "user", "content": "hi"}
    result = {"role": "tool", "tool_call_id": "abcdef123", "content": "x"}
    system, *others = for_dialect([asked, CALL, result], [tool], found)
    assert system["role"] == "system" and '"name":"f"' in system["content"]
    assert others == [asked, CALL, result]
    assert for_dialect([asked, CALL, result], [], found) == [asked, CALL, result]


def test_calls_that_a_template_leaves_out_are_not_lost_where_an_option_chooses() -> None:
    for name in ("hermes", "qwen3_coder", "kimi_k3"):
        found = dialect(OTHERS["definitions alone"], name)
        assert (found.format.name, found.by_template, found.calls_by_template) == (name, True, False)
        [message] = for_dialect([CALL], [], found)
        assert found.format.calls([("f", '{"a": "b", "n": 1}')]) in message["content"]
