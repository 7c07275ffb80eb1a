"""Formats of tool calls that no row has, derived from templates of our own in the manner of published ones."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from support.api.tool_templates import PROBED, TEMPLATES, TemplateOnly

from rootgraft.api.protocol.tools import Function, NamedChoice, Tool
from rootgraft.api.structured.tool_dialects import Dialect, dialect_of
from rootgraft.api.structured.tool_formats import FORMATS, CallIds, ToolFormat
from rootgraft.api.structured.tool_grammar import tool_output_format
from rootgraft.api.structured.tool_parser import read_calls
from rootgraft.api.structured.tool_probe import probed_calls
from rootgraft.engine.errors import RequestError
from rootgraft.grammar.argument_styles import xml_marks, xml_style
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.vocabulary import Vocabulary

VOCABULARY = Vocabulary((*(bytes([byte]) for byte in range(256)), b"</s>"), frozenset({256}), (256,), 257)
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    Tool(type="function", function=Function(name="get_weather", parameters=CITY)),
    Tool(type="function", function=Function(name="ping", parameters={"type": "object", "properties": {}})),
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "São Paulo & [2] {3}", "days": 3, "metric": True, "tags": ["a", "b c"]}),
    ("ping", {}),
]
Reader = Callable[[str], list[tuple[str, dict[str, Any]]]]


def objects(name: str, arguments: str) -> Reader:
    """Read calls that are JSON objects, wherever they are."""

    def read(text: str) -> list[tuple[str, dict[str, Any]]]:
        found, at = [], 0
        while (at := text.find("{", at)) >= 0:
            value, at = json.JSONDecoder().raw_decode(text, at)
            found.append((value[name], value[arguments]))
        return found

    return read


def in_text(pattern: str) -> Reader:
    """Read calls by an expression of a name and its arguments as JSON."""
    return lambda text: [(name, json.loads(arguments)) for name, arguments in re.findall(pattern, text)]


def in_marks(call: str, parameter: str) -> Reader:
    """Read calls by an expression of a name and parameters, and one of a parameter's name and value."""

    def value(name: str, text: str) -> Any:
        return text if name == "city" else json.loads(text.lower() if name == "metric" else text)

    return lambda text: [
        (name, {each[0]: value(*each) for each in re.findall(parameter, inside)})
        for name, inside in re.findall(call, text, re.DOTALL)
    ]


LISTED = objects("name", "arguments")
READERS: dict[str, Reader] = {
    "list over lines": LISTED,
    "list": LISTED,
    "name as key": lambda text: [pair for each in json.loads(text[9:-8]) for pair in each.items()],
    "objects over lines": LISTED,
    "number before the name": objects("tool", "parameters"),
    "id before the name": in_text(r"<\|name\|>(\w+)<\|args\|>(.*?)<\|call:end\|>"),
    "id behind the name": in_text(r"<\|call\|>(\w+)<\|id\|>\w+<\|args\|>(.*?)<\|call:end\|>"),
    "id behind the arguments": LISTED,
    "single": LISTED,
    "arguments as text": in_text("<call>(\\w+):(.*?)</call>"),
    "parameters": in_marks('<function name="(\\w+)">(.*?)</function>', '<param name="(\\w+)">(.*?)</param>'),
    "keys and values": in_marks(
        r"<call:x>(\w+)<sep:x>\n(.*?)</call:x>", r"<key:x>(\w+)</key:x>\n<value:x>(.*?)</value:x>"
    ),
    "keywords over lines": lambda text: [
        (name, {key: ast.literal_eval(value) for key, value in re.findall(r"(\w+)=(\[.*?\]|\".*?\"|\w+)", inside)})
        for name, inside in re.findall(r"^(\w+)\((.*)\)$", text, re.MULTILINE)
    ],
    "object between marks": objects("name", "parameters"),
    "numbers, and no header of an answer": objects("tool", "parameters"),
}


def found(name: str) -> tuple[TemplateOnly, Dialect]:
    tokenizer = TemplateOnly(PROBED[name], "<|end|>")
    return tokenizer, dialect_of(tokenizer, "auto")  # type: ignore[arg-type]


def written(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def rendered(tokenizer: TemplateOnly, dialect: Dialect, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return the turn of these calls as the template writes it."""
    said = [
        {
            "id": f"id{number}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(value, ensure_ascii=False) if dialect.arguments_as_text else value,
            },
        }
        for number, (name, value) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": said}
    text = tokenizer.render_chat([message], add_generation_prompt=False)
    text = text.removeprefix("<|assistant|>").removeprefix("[assistant]").removesuffix("<|end|>")
    return re.sub(', "id": "id[0-9]"', "", text)


@pytest.mark.parametrize("name", PROBED)
def test_the_calls_of_a_template_are_read_back_and_admitted(name: str) -> None:
    """Whatever the template writes is admitted by the grammar, and read as a parser of its own reads it."""
    tokenizer, dialect = found(name)
    assert (dialect.format.name, dialect.by_template, dialect.calls_by_template) == ("probed", True, True)
    calls = CALLS[:1] if dialect.format.single else CALLS
    assert dialect.format.single is (name == "single")
    text = rendered(tokenizer, dialect, calls)
    assert READERS[name](text) == calls
    plan = tool_output_format(TOOLS, "auto", dialect.format, None, parallel=True)
    assert plan is not None and plan.tools is not None
    content, read = read_calls(plan.tools, text)
    assert not content
    assert [(call.name, json.loads(call.arguments)) for call in read] == calls
    matcher = compile(plan.spec, VOCABULARY).matcher()
    assert all(map(matcher.accept, text.encode())) and matcher.can_end
    wrong = text.replace("3", '"x"').encode()
    matcher = compile(plan.spec, VOCABULARY).matcher()
    assert not all(map(matcher.accept, wrong))


@pytest.mark.parametrize("name", PROBED)
def test_calls_are_written_as_the_template_writes_them(name: str) -> None:
    tokenizer, dialect = found(name)
    calls = CALLS[:1] if dialect.format.single else CALLS
    text = dialect.format.calls([(function, written(value)) for function, value in calls])
    expected = rendered(tokenizer, dialect, calls)
    if dialect.format.ids is not CallIds.ANY:
        text, expected = re.sub(r"([|]>|l\": \")[0-9]", r"\1id0", text), re.sub("id[0-9]", "id0", expected)
        expected = re.sub(r"(l\": \")[0-9]", r"\1id0", expected)
    assert text.replace("True", "true") == expected.replace("True", "true")


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("name", PROBED)
def test_forced_calls_are_read_back(name: str, choice: str) -> None:
    _, dialect = found(name)
    form = dialect.format
    asked: Any = choice
    if choice == "named":
        asked = NamedChoice.model_validate({"type": "function", "function": {"name": "ping"}})
    plan = tool_output_format(TOOLS, asked, form, None, parallel=True)
    assert plan is not None and plan.tools is not None
    text = form.calls([("ping", "{}")])
    if form.is_object:
        call = f'{{"name": "ping", "{form.arguments_key}": {{}}}}'
        text = "{}" if choice == "named" else call if form.single else f"[{call}]"
        assert "[[" not in re.sub(r"\s", "", plan.tools.prefill + text)
    matcher = compile(plan.spec, VOCABULARY).matcher()
    assert all(map(matcher.accept, text.encode())) and matcher.can_end
    _, calls = read_calls(plan.tools, text)
    assert [(call.name, call.arguments, call.is_whole) for call in calls] == [("ping", "{}", True)]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "seed_oss", "glm45", "minimax_m2", "granite"])
def test_probing_finds_what_the_rows_say(name: str) -> None:
    tokenizer = TemplateOnly(TEMPLATES[name])

    def render(messages: Any, tools: Any, has_header: bool) -> str:
        try:
            return tokenizer.render_chat(messages, add_generation_prompt=has_header, tools=tools)
        except RequestError:
            return ""

    probed = probed_calls(render, thought_end="", ends=frozenset())
    assert probed is not None and not probed.arguments_as_text
    calls = [(function, written(value)) for function, value in CALLS]
    assert probed.format.calls(calls) == FORMATS[name].calls(calls)


def test_content_is_between_its_marks() -> None:
    _, dialect = found("number before the name")
    form = dialect.format
    assert (form.content_opening, form.content_closing) == ("<|TEXT|>", "<|END_TEXT|>")
    plan = tool_output_format(TOOLS, "auto", form, None, parallel=True)
    assert plan is not None and plan.tools is not None
    text = "<|TEXT|>It rains. <|END_<|END_TEXT|>"
    assert read_calls(plan.tools, text) == ("It rains. <|END_", [])
    matcher = compile(plan.spec, VOCABULARY).matcher()
    assert all(map(matcher.accept, text.encode())) and matcher.can_end


def test_what_opens_calls_is_no_ordinary_text() -> None:
    """A call that begins like an answer or like JSON, or names its function twice, is no format."""
    bodies = (
        "Action: {{ call.function.name }} {{ call.function.arguments | tojson }}",
        '{"call": "{{ call.function.name }}", "with": {{ call.function.arguments | tojson }}}',
        "<to {{ call.function.name }}><call>{{ call.function.name }}:{{ call.function.arguments | tojson }}</call>",
        "<call>{{ call.function.arguments | tojson }}{{ call.function.name }}</call>",
    )
    for body in bodies:
        loop = f"{{% for call in message.tool_calls or [] %}}{body}{{% endfor %}}"
        source = f"{{{{ tools }}}}{{% for message in messages %}}{{{{ message.content }}}}{loop}{{% endfor %}}"
        assert dialect_of(TemplateOnly(source), "auto").format.name == "generic"  # type: ignore[arg-type]


def test_marks_of_a_style_are_an_object_of_strings() -> None:
    _, dialect = found("parameters")
    marks = xml_marks(xml_style(dialect.format.style))  # type: ignore[arg-type]
    assert marks == {"key_begin": '<param name="', "key_end": '">', "mark": "</param>"}
    made = xml_style(marks)
    assert made is not None and xml_marks(made) == marks
    for wrong in ({**marks, "extra": ""}, {**marks, "mark": " "}, {**marks, "mark": "x" * 201}, {"mark": 3}, {}):
        with pytest.raises(ValueError, match=r"must have|has no 'extra'"):
            xml_style(wrong)
    assert xml_style({**marks, "mark": "x" * 200}) is not None
    assert isinstance(dialect.format, ToolFormat)


def test_definitions_go_into_text_where_the_template_renders_calls_alone() -> None:
    source = PROBED["list"].replace("{% if tools %}", "{% if false %}", 1)
    dialect = dialect_of(TemplateOnly(source, "<|end|>"), "auto")  # type: ignore[arg-type]
    assert (dialect.format.name, dialect.by_template, dialect.lists_tools) == ("probed", True, False)


def test_a_template_that_always_renders_a_header_has_marks_around_answers() -> None:
    """As Command R7B's does, with marks in the header that no earlier answer has."""
    source = PROBED["number before the name"].replace("{% if add_generation_prompt %}", "").removesuffix("{% endif %}")
    assert source.endswith("{% endfor %}<|assistant|>")
    dialect = dialect_of(TemplateOnly(source + "<|no thought|>", "<|end|>"), "auto")  # type: ignore[arg-type]
    form = dialect.format
    assert (form.name, form.content_opening, form.content_closing) == ("probed", "<|TEXT|>", "<|END_TEXT|>")
