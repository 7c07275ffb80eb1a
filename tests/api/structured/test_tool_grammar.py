"""The grammars of answers with tools, compiled: what each format's grammar lets through, over a vocabulary of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from rootgraft.api.anthropic.message_request import MessagesRequest
from rootgraft.api.config import TOOL_CALL_PARSERS
from rootgraft.api.protocol.chat import ChatRequest
from rootgraft.api.protocol.responses import ResponseRequest
from rootgraft.api.protocol.tools import MAX_TOOLS, Function, NamedChoice, Tool
from rootgraft.api.structured.output_format import OutputFormat
from rootgraft.api.structured.tool_formats import ALIASES, FORMATS, ToolFormat, formats_of
from rootgraft.api.structured.tool_grammar import tool_output_format
from rootgraft.api.structured.tool_parser import read_calls
from rootgraft.engine.errors import GrammarRefused, RequestError
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

EOS, TOOL_CALLS = 256, 257
VOCABULARY = Vocabulary(
    (*(bytes([byte]) for byte in range(256)), b"</s>", b"[TOOL_CALLS]"), frozenset({EOS, TOOL_CALLS}), (EOS,), 258
)
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"enum": ["Ulm", "Bonn"]}},
}
TOOLS = [
    Tool(type="function", function=Function(name="weather", parameters=CITY)),
    Tool(type="function", function=Function(name="ping")),
]
ULM, PING = ("weather", '{"city": "Ulm"}'), ("ping", "{}")
DOCUMENT = GrammarSpec.json_schema({"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}})
ASKED = OutputFormat(DOCUMENT, "response_format", "json_schema", DOCUMENT)


def compiled(
    form: ToolFormat, choice: Any = "auto", asked: OutputFormat | None = None, *, parallel: bool = True
) -> CompiledGrammar:
    output_format = tool_output_format(TOOLS, choice, form, asked, parallel=parallel)
    assert output_format is not None
    return compile(output_format.spec, VOCABULARY)


def lets_through(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    for number, piece in enumerate(text.split("[TOOL_CALLS]")):
        if number and not matcher.accept(TOOL_CALLS):
            return False
        if not all(matcher.accept(byte) for byte in piece.encode()):
            return False
    return matcher.can_end


def written(form: ToolFormat, *calls: tuple[str, str]) -> str:
    return form.calls(list(calls))


def content(form: ToolFormat, text: str) -> str:
    """Text without calls, as the format writes it."""
    return form.content_opening + text


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_free_text_and_calls(form: ToolFormat) -> None:
    grammar = compiled(form)
    for text in ("", "Hello!\n", '{"a": 1}', "<tool", '{"name"', "[", "[a](b)"):
        assert lets_through(grammar, content(form, text)), text
    assert lets_through(grammar, written(form, ULM)) and lets_through(grammar, written(form, PING))
    for call in (
        ("weather", '{"city": "Rome"}'),
        ("weather", "{}"),
        ("ping", '{"a": 1}'),
        ("other", "{}"),
        ("ping", "{"),
    ):
        if written(form, call) != written(form, ("ping", "{}")):
            assert not lets_through(grammar, written(form, call)), call
    assert not lets_through(grammar, written(form, ULM)[:-1])
    text = "Well.\n" + written(form, ULM)
    if form.recipient_mark:
        assert not lets_through(grammar, text)
        text = content(form, f"Well. >>> x\n>>>other\n{form.separator}") + written(form, ULM)
    if form.preamble is not None:
        before, after = form.preamble
        assert lets_through(grammar, f"{before}Well.{after}{written(form, ULM)}")
        assert not lets_through(grammar, text) and not lets_through(grammar, f"{before}Well.{after}")
    elif form.only_at_start:
        assert lets_through(grammar, text)  # text, as it does not begin like a call
    else:
        assert lets_through(grammar, text) and not lets_through(grammar, text[:-1])
    if not form.single:
        assert lets_through(grammar, written(form, ULM, PING, ULM))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_one_call_at_most(form: ToolFormat) -> None:
    grammar = compiled(form, parallel=False)
    assert lets_through(grammar, written(form, PING)) and lets_through(grammar, content(form, "text"))
    assert not lets_through(grammar, written(form, PING, PING))


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if not form.only_at_start], ids=lambda f: f.name)
def test_calls_or_a_document(form: ToolFormat) -> None:
    grammar = compiled(form, asked=ASKED)
    for text in (content(form, '{"a": 5}'), written(form, ULM), *([] if form.single else [written(form, PING, ULM)])):
        assert lets_through(grammar, text), text
    for text in ("", "text", "{}", '{"a": 5}' + written(form, PING), written(form, PING) + "!"):
        assert not lets_through(grammar, content(form, text)), text


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if form.only_at_start], ids=lambda f: f.name)
def test_no_document_where_calls_have_no_marks(form: ToolFormat) -> None:
    with pytest.raises(RequestError, match="calls without marks"):
        compiled(form, asked=ASKED)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_forced_calls(form: ToolFormat) -> None:
    def item(name: str, arguments: str) -> str:
        return f'{{"name": "{name}", "{form.arguments_key}": {arguments}}}'

    named = compiled(form, NamedChoice.model_validate({"type": "function", "function": {"name": "weather"}}))
    one = compiled(form, "required", parallel=form.single)
    if not form.is_object:
        check_native(form, named, one)
        return
    assert lets_through(named, ULM[1]) and not lets_through(named, "{}")
    assert lets_through(one, item(*PING)) and not lets_through(one, f"[{item(*PING)}]")
    if form.single:
        return
    several = compiled(form, "required")
    assert lets_through(several, f"[{item(*ULM)}]") and lets_through(several, f"[{item(*ULM)}, {item(*PING)}]")
    for text in ("[]", "", item(*ULM), f"[{item('ping', '5')}]", f"[{item('weather', '{}')}]", f"[{item(*PING)}"):
        assert not lets_through(several, text), text


def check_native(form: ToolFormat, named: CompiledGrammar, one: CompiledGrammar) -> None:
    """Forced calls of formats whose calls are no JSON objects: in the format, and nothing beside them."""
    assert lets_through(named, written(form, ULM)) and not lets_through(named, written(form, PING))
    assert not lets_through(named, written(form, ULM, ULM))
    assert lets_through(one, written(form, ULM)) and lets_through(one, written(form, PING))
    for text in ("", content(form, "text"), f"text {written(form, PING)}", f"{written(form, PING)} text"):
        assert not lets_through(one, text), text
    if not form.single:
        assert not lets_through(one, written(form, PING, ULM))
        assert lets_through(compiled(form, "required"), written(form, PING, ULM))


def test_parts_with_recipients_are_told_apart() -> None:
    """Functionary's: the prompt ends in the mark; text is addressed to all, and no function can have that name."""
    form = FORMATS["functionary_v32"]
    output_format = tool_output_format(TOOLS, "auto", form, None, parallel=True)
    assert output_format is not None and output_format.tools is not None
    text = 'all\nSee >>> x\n>>>other\n{}>>>weather\n{"city": "Ulm"}>>>ping\n{}'
    assert lets_through(compiled(form), text)
    content, calls = read_calls(output_format.tools, text)
    assert content == "See >>> x\n>>>other\n{}"
    assert [(call.name, call.arguments) for call in calls] == [ULM, PING]
    assert not lets_through(compiled(form, parallel=False), text)
    assert (form.text_opening("<|eot_id|>assistant\n>>>"), form.text_opening("Say >>>.")) == ("all\n", "")
    assert FORMATS["hermes"].text_opening("Hi") == ""
    tools = [*TOOLS, Tool(type="function", function=Function(name="all"))]
    with pytest.raises(RequestError, match=r"'tools\[2\].function.name' cannot be 'all'") as caught:
        tool_output_format(tools, "auto", form, None, parallel=True)
    assert caught.value.param == "tools[2].function.name"
    assert tool_output_format(tools, "none", form, None, parallel=True) is None
    assert tool_output_format(tools, "auto", FORMATS["hermes"], None, parallel=True) is not None


def test_calls_after_the_end_of_the_content() -> None:
    """Kimi K3's: the prompt, or the end of a thought, opens the content; nothing after its end is for the client."""
    form = FORMATS["kimi_k3"]
    output_format = tool_output_format(TOOLS, "auto", form, None, parallel=True)
    assert output_format is not None and output_format.tools is not None
    closing, turn_end = "<|close|>response<|sep|>", "<|close|>message<|sep|>"
    for text, calls in ((f"Well.{form.calls([ULM, PING])}", [ULM, PING]), (f"Well.{closing}", []), ("Well.<|cl", [])):
        for whole in {text, text + (turn_end if text.endswith("<|sep|>") else "")}:
            assert lets_through(compiled(form), text)
            content, read = read_calls(output_format.tools, whole)
            assert content == ("Well.<|cl" if text == "Well.<|cl" else "Well.")
            assert [(call.name, call.arguments) for call in read] == calls


def test_parts_with_an_end_before_the_next_recipient() -> None:
    """Muse Glimmer's: text, its end, and the header of the message that is a call."""
    form = FORMATS["muse_glimmer"]
    output_format = tool_output_format(TOOLS, "auto", form, None, parallel=True)
    assert output_format is not None and output_format.tools is not None
    text = f" to=user<|message|>Wait.<|eom|><|start|>assistant{form.calls([ULM, PING])}"
    assert lets_through(compiled(form), text)
    content, calls = read_calls(output_format.tools, text)
    assert (content, [(call.name, call.arguments) for call in calls]) == ("Wait.", [ULM, PING])
    call = form.calls([PING])
    assert lets_through(compiled(form), call) and not lets_through(compiled(form), call.replace('"ping"', '"weather"'))
    tools = [*TOOLS, Tool(type="function", function=Function(name="user"))]
    with pytest.raises(RequestError, match=r"'tools\[2\].function.name' cannot be 'user'"):
        tool_output_format(tools, "auto", form, None, parallel=True)


def test_the_option_knows_the_formats() -> None:
    assert ("auto", *dict.fromkeys(form.option for form in FORMATS.values()), *ALIASES) == TOOL_CALL_PARSERS
    assert all(formats_of(name) for name in TOOL_CALL_PARSERS)


def test_the_page_has_a_row_for_each_format() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guide" / "structured-outputs.md").read_text()
    for form in FORMATS.values():
        assert f"| `{form.option}` | {form.models} |" in page, form.name


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_what_the_grammar_lets_through_is_read(form: ToolFormat) -> None:
    output_format = tool_output_format(TOOLS, "auto", form, None, parallel=True)
    assert output_format is not None and output_format.tools is not None
    _, calls = read_calls(output_format.tools, written(form, ULM))
    assert [(call.name, call.arguments) for call in calls] == [ULM]


FOUR = {
    "$schema": "http://json-schema.org/draft-04/schema#",
    "properties": {"n": {"type": "integer", "minimum": 0, "exclusiveMinimum": True}},
}
SEVEN = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "properties": {"n": {"$ref": "#/definitions/n", "type": "string"}},
    "definitions": {"n": {"type": "integer", "minimum": 1}},
}
WHOLE = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$ref": "#/definitions/all",
    "definitions": {"all": {"properties": {"n": {"type": "integer", "minimum": 1}}}},
}


@pytest.mark.parametrize("choice", ["auto", "required", NamedChoice(type="function", function={"name": "f"})], ids=str)
@pytest.mark.parametrize("schema", [FOUR, SEVEN, WHOLE], ids=["4", "7", "a reference as a whole"])
def test_a_tool_is_of_the_draft_that_its_schema_names(schema: dict[str, Any], choice: Any) -> None:
    """Alone or among others: exclusiveMinimum is a boolean in draft 4, and nothing counts beside $ref up to draft 7."""
    form = FORMATS["hermes"]
    tools = [Tool(type="function", function=Function(name=name, parameters=schema)) for name in "fg"]
    output_format = tool_output_format(tools, choice, form, None, parallel=True)
    assert output_format is not None and output_format.tools is not None
    grammar = compile(output_format.spec, VOCABULARY)
    for arguments, valid in (('{"n": 1}', True), ('{"n": 0}', False), ('{"n": "1"}', False)):
        text = {"auto": written(form, ("g", arguments)), "required": f'[{{"name": "g", "arguments": {arguments}}}]'}
        assert lets_through(grammar, text.get(choice, arguments) if isinstance(choice, str) else arguments) == valid


def real_tools(count: int, described: int) -> list[Tool]:
    """Tools like those of MCP servers: a dozen parameters, an enumeration, a list of objects, descriptions."""
    found = []
    for number in range(count):
        text = {"description": f"{number} " + "d" * described}
        properties: dict[str, Any] = {f"p{i}": {"type": "string"} | text for i in range(6)}
        properties |= {"page": {"type": "integer", "minimum": 1} | text, "state": {"enum": ["open", "closed"]} | text}
        row = {"type": "object", "properties": {"id": {"type": "string"} | text}, "required": ["id"]}
        properties["rows"] = {"type": "array", "items": row} | text
        schema = {"type": "object", "properties": properties, "required": ["p0"], "additionalProperties": False}
        function = Function(name=f"tool_{number}", description="d" * described, parameters=schema)
        found.append(Tool(type="function", function=function))
    return found


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(("count", "described"), [(128, 2_000), (MAX_TOOLS, 0)])
def test_as_many_tools_as_may_be_given_are_compiled_whatever_their_descriptions(
    choice: str, count: int, described: int
) -> None:
    found = tool_output_format(real_tools(count, described), choice, FORMATS["hermes"], None, parallel=True)
    assert found is not None
    if described:
        assert (
            found.spec == tool_output_format(real_tools(count, 1), choice, FORMATS["hermes"], None, parallel=True).spec
        )
    grammar = compile(found.spec, VOCABULARY)
    call = {"name": f"tool_{count - 1}", "arguments": {"p0": "a", "rows": [{"id": "1"}]}}
    text = json.dumps(call)
    assert lets_through(grammar, f"[{text}]" if choice == "required" else f"<tool_call>\n{text}\n</tool_call>")


def test_tools_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for each of the tools among all of them took 0.1 s of the event loop for 190 tools."""

    def compare(*_: object) -> bool:
        raise AssertionError("tools are compared")

    tools = [Tool(type="function", function=Function(name=f"f{number}", parameters=CITY)) for number in range(3)]
    monkeypatch.setattr(BaseModel, "__eq__", compare)
    assert tool_output_format(tools, "auto", FORMATS["hermes"], None, parallel=True)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_what_all_tools_together_exceed_is_told_of_the_tools_and_of_no_place_that_the_client_has_not_sent(
    choice: str,
) -> None:
    schema = {"type": "object", "properties": {"a": {"const": "x" * 5_000}}}
    tools = [Tool(type="function", function=Function(name=f"f{number}", parameters=schema)) for number in range(110)]
    with pytest.raises(GrammarRefused) as caught:
        tool_output_format(tools, choice, FORMATS["hermes"], None, parallel=True)
    assert (caught.value.param, caught.value.keyword, caught.value.pointer) == ("tools", "tools", "")
    assert "bytes; the limit is" in caught.value.reason


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_what_one_of_the_tools_exceeds_is_told_of_its_parameters(choice: str) -> None:
    large = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"const": "x" * 400_000}}}}}
    tools = [*TOOLS, Tool(type="function", function=Function(name="large", parameters=large))]
    tools += [Tool(type="function", function=Function(name="also", parameters={"const": {"c": "x" * 200_000}}))]
    with pytest.raises(GrammarRefused) as caught:
        tool_output_format(tools, choice, FORMATS["hermes"], None, parallel=True)
    assert caught.value.param == "tools[2].function.parameters"
    assert (caught.value.keyword, caught.value.pointer) == ("const", "/properties/a/properties/b/const")


@pytest.mark.parametrize("pointer", ["", "/format/tags/0/content/elements", "/nowhere"])
def test_the_engine_s_error_about_the_grammar_around_the_schemas_names_the_tools(pointer: str) -> None:
    found = tool_output_format(TOOLS, "auto", FORMATS["hermes"], None, parallel=True)
    assert found is not None
    with pytest.raises(GrammarRefused) as caught, found.locating_errors():
        raise GrammarRefused("structural_tag", pointer, "too complex")
    assert (caught.value.param, caught.value.keyword, caught.value.pointer) == ("tools", "tools", "")


def test_all_protocols_take_as_many_tools() -> None:
    schema = {"type": "object"}
    functions = [{"name": f"f{number}", "parameters": schema} for number in range(MAX_TOOLS + 1)]
    chat = [{"type": "function", "function": each} for each in functions]
    responses = [{"type": "function", **each} for each in functions]
    anthropic = [{"name": each["name"], "input_schema": schema} for each in functions]
    hi = [{"role": "user", "content": "hi"}]

    def check(model: type[BaseModel], tools: list[Any], **fields: Any) -> None:
        model.model_validate({"model": "m", **fields, "tools": tools[:MAX_TOOLS]})
        with pytest.raises(ValidationError, match=f"at most {MAX_TOOLS}"):
            model.model_validate({"model": "m", **fields, "tools": tools})

    assert MAX_TOOLS >= 256
    check(ChatRequest, chat, messages=hi)
    check(ResponseRequest, responses, input="hi")
    check(MessagesRequest, anthropic, messages=hi, max_tokens=5)
