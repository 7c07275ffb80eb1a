"""Arguments that are no JSON (marks, Python): written by hand or by a walk of the grammar, and read back as JSON."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from numpy.typing import NDArray
from support.machine.thoroughness import repeats

from benchmarks.grammar.limited_walk import draw_within
from rootgraft.api.protocol.tools import Function, Tool
from rootgraft.api.structured import argument_syntax
from rootgraft.api.structured.tool_formats import FORMATS
from rootgraft.api.structured.tool_grammar import tool_output_format
from rootgraft.api.structured.tool_parser import ToolParser, read_calls
from rootgraft.api.structured.tool_plan import Arguments, CallStart, Content, ToolPlan
from rootgraft.engine.errors import GrammarRefused
from rootgraft.grammar.argument_styles import GEMMA, GEMMA_QUOTE, XML_STYLES, argument_types
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

EOS = 256
VOCABULARY = Vocabulary((*(bytes([byte]) for byte in range(256)), b"</s>"), frozenset({EOS}), (EOS,), 257)
STYLED = [name for name, form in FORMATS.items() if form.style != "json"]
IN_MARKS = [name for name in STYLED if FORMATS[name].style in XML_STYLES]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"$ref": "#/$defs/text"},
        "maybe": {"type": ["string", "null"]},
        "mixed": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "integer"}, {"type": "array"}]},
        "unit": {"enum": ["C", "F", 3, None]},
        "count": {"type": "integer", "minimum": -5, "maximum": 99},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "string"}},
        "object": {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]},
    },
    "required": ["text"],
    "additionalProperties": False,
    "$defs": {"text": {"type": "string", "maxLength": 40}},
}
OPEN = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]*$"}}}
TOOLS = [
    Tool(type="function", function=Function(name="f", parameters=PARAMETERS)),
    Tool(type="function", function=Function(name="f-2.b", parameters=OPEN)),
    Tool(type="function", function=Function(name="ping")),
]
SCHEMAS = {"f": PARAMETERS, "f-2.b": OPEN, "ping": {"const": {}}}

HOSTILE = [
    "", " ", "\n", "null", "true", "12", "-0.5e3", "[", "{", '"', "\\", '\\"', "'", "a\nb", "</tool_call>",
    "</function>", "<parameter=text>", "</invoke>", "<arg_key>", "]", ")", "<|tool_call|>", "日本", "😀", "\x00",
    "None", "é", "[x", "007", " null ", "<tool_call>", "</", "</para", "\n\n", "\r\n",
]  # fmt: skip
TEXT = st.lists(st.sampled_from([*HOSTILE, "a", "Ulm "]), max_size=4).map("".join)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from([0.5, -1.5e-07]) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT.filter("a".__ne__), inner, max_size=2),
    max_leaves=5,
)


def in_order(value: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(value.items()))


ARGUMENTS = st.fixed_dictionaries(
    {"text": TEXT.map(lambda text: text[:40])},
    optional={
        "maybe": st.none() | TEXT,
        "mixed": TEXT.filter(bool) | st.integers(-9, 99) | st.lists(ANY, max_size=2),
        "unit": st.sampled_from(["C", "F", 3, None]),
        "count": st.integers(-5, 99),
        "flag": st.booleans(),
        "list": st.lists(TEXT, max_size=2),
        "object": st.fixed_dictionaries({"a": st.none() | TEXT}, optional={"b": ANY}).map(in_order),
    },
).map(lambda value: {name: value[name] for name in PARAMETERS["properties"] if name in value})


def plan_and_grammar(form: str, *, parallel: bool = True) -> tuple[ToolPlan, CompiledGrammar]:
    found = tool_output_format(TOOLS, "auto", FORMATS[form], None, parallel=parallel)
    assert found is not None and found.tools is not None
    return found.tools, compile(found.spec, VOCABULARY)


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[ToolPlan, CompiledGrammar]]:
    return {form: plan_and_grammar(form) for form in STYLED}


def is_admitted(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(map(matcher.accept, text.encode())) and matcher.can_end


def streamed(plan: ToolPlan, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    parser = ToolParser(plan)
    content, calls = "", list[tuple[str, str]]()
    events = [event for start, end in pairwise(bounds) for event in parser.push(text[start:end])]
    for event in (*events, *parser.finish()):
        match event:
            case Content():
                content += event.text
            case CallStart():
                calls.append((event.name, ""))
            case Arguments():
                calls[-1] = calls[-1][0], calls[-1][1] + event.text
    return content, calls


def reads_as_other(form: str, value: dict[str, Any]) -> bool:
    """Whether a string cannot be written: it holds the end mark, or looks like another type that is admitted."""
    if FORMATS[form].style == GEMMA:
        return not has_plain_names(value)
    style = XML_STYLES.get(FORMATS[form].style)
    if style is None:
        return False
    maybe, mixed = value.get("maybe"), value.get("mixed")
    if style.text_key_end:
        maybe = mixed = None
    return (
        (isinstance(maybe, str) and maybe.strip(" \t\r\n") == "null")
        or (isinstance(mixed, str) and (mixed.strip(" \t\r\n")[:1] == "[" or is_integer(mixed.strip(" \t\r\n"))))
        or any(isinstance(text, str) and style.mark in text for text in value.values())
    )


def has_plain_names(value: Any) -> bool:
    """Whether all names are made of letters alone, as names without quotes must be."""
    if isinstance(value, dict):
        return all(name.isalpha() and has_plain_names(each) for name, each in value.items())
    return not isinstance(value, list) or all(map(has_plain_names, value))


def is_integer(text: str) -> bool:
    try:
        return isinstance(json.loads(text), int | float) and text not in ("true", "false")
    except ValueError:
        return False


@pytest.mark.parametrize("form", STYLED)
@settings(max_examples=repeats(60), deadline=None)
@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=2), cuts=st.lists(st.integers(0, 1 << 20), max_size=40))
def test_arguments_are_admitted_and_read_back(
    made: dict[str, tuple[ToolPlan, CompiledGrammar]], form: str, calls: list[dict[str, Any]], cuts: list[int]
) -> None:
    plan, grammar = made[form]
    calls = [value for value in calls if not reads_as_other(form, value)]
    text = FORMATS[form].calls([("f", json.dumps(value)) for value in calls]) if calls else ""
    assert is_admitted(grammar, text)
    content, found = streamed(plan, text, cuts)
    assert content == "" and [name for name, _ in found] == ["f"] * len(calls)
    assert [json.loads(arguments) for _, arguments in found] == calls
    assert streamed(plan, text, [*range(len(text))])[1] == found


@pytest.mark.parametrize("form", STYLED)
@settings(max_examples=25, deadline=None)
@given(value=ARGUMENTS, end=st.integers(0, 1 << 20))
def test_what_is_cut_off_is_a_part_of_the_whole(
    made: dict[str, tuple[ToolPlan, CompiledGrammar]], form: str, value: dict[str, Any], end: int
) -> None:
    plan, _ = made[form]
    text = FORMATS[form].calls([("f", json.dumps(value))])
    [(_, whole)] = streamed(plan, text, [])[1]
    for _, part in streamed(plan, text[: end % len(text)], [])[1]:
        assert whole.startswith(part)


@pytest.mark.parametrize("form", STYLED)
def test_what_a_walk_of_the_grammar_writes_is_valid(
    made: dict[str, tuple[ToolPlan, CompiledGrammar]], form: str
) -> None:
    """Random bytes that the grammar allows, with a budget: calls that are whole, and arguments valid for the schema."""
    plan, grammar = made[form]
    rng = random.Random(7)
    num_calls = 0
    for _ in range(4):
        text = walked(grammar, FORMATS[form].opening + FORMATS[form].head("f"), rng)
        _, calls = read_calls(plan, text)
        for call in calls:
            Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))
            num_calls += 1
    assert num_calls >= 4


def walked(
    grammar: CompiledGrammar, start: str, rng: random.Random, budget: int = 400, vocabulary: Vocabulary = VOCABULARY
) -> str:
    """Return text of the grammar: a start, then letters at random, rare ones rarely, to an end within the budget."""
    matcher = grammar.matcher()
    written = list[int]()
    mask = np.zeros(vocabulary.num_words, dtype=np.int32)
    for byte in start.encode():
        assert matcher.accept(byte)
        written.append(byte)
    common = frozenset(b'abf12 ,.:="<>/[]{}()\n_-')

    def choose(allowed: NDArray[np.int64]) -> int:
        liked = [int(token) for token in allowed if token in common] if rng.random() < 0.95 else []
        return EOS if EOS in allowed and rng.random() < 0.3 else rng.choice(liked or [int(t) for t in allowed])

    while len(written) < budget:
        token = draw_within(matcher, mask, budget - len(written), choose)
        assert matcher.accept(token)
        if token == EOS:
            break
        written.append(token)
    assert matcher.is_done or matcher.can_end, text_of(written, vocabulary)
    return text_of(written, vocabulary)


def text_of(tokens: list[int], vocabulary: Vocabulary) -> str:
    return b"".join(vocabulary.tokens[token] for token in tokens).decode(errors="replace")


@pytest.mark.parametrize("form", [form for form in IN_MARKS if not XML_STYLES[FORMATS[form].style].tells_strings])
def test_strings_that_cannot_be_told_from_other_values_are_not_written(
    made: dict[str, tuple[ToolPlan, CompiledGrammar]], form: str
) -> None:
    plan, grammar = made[form]
    style = XML_STYLES[FORMATS[form].style]

    def call(**values: str) -> str:
        body = "".join(f"{style.key_begin}{k}{style.key_end}{v}{style.value_end}" for k, v in values.items())
        after_name = FORMATS[form].after_name.replace("{name}", "f")
        return FORMATS[form].calls([("f", "{}")]).replace("f" + after_name, f"f{after_name}{body}")

    def value(text: str) -> Any:
        assert is_admitted(grammar, text)
        return json.loads(read_calls(plan, text)[1][0].arguments)

    assert value(call(text="null", maybe="null", mixed="12")) == {"text": "null", "maybe": None, "mixed": 12}
    assert value(call(text="12", maybe="12", mixed="null")) == {"text": "12", "maybe": "12", "mixed": "null"}
    assert value(call(text=" ", mixed="007", unit="3")) == {"text": " ", "mixed": "007", "unit": 3}
    for text in (call(text=f"a{style.mark}b"), call(text="a", count="x"), call(text="a", count="100"), call(count="1")):
        assert not is_admitted(grammar, text), text


@pytest.mark.parametrize("form", [form for form in IN_MARKS if XML_STYLES[FORMATS[form].style].tells_strings])
def test_strings_with_a_mark_of_their_own_are_whatever_they_look_like(
    made: dict[str, tuple[ToolPlan, CompiledGrammar]], form: str
) -> None:
    plan, grammar = made[form]
    style = XML_STYLES[FORMATS[form].style]

    def call(*values: tuple[str, str, bool]) -> str:
        body = "".join(style.written(name, value, is_text=is_text) for name, value, is_text in values)
        whole = FORMATS[form].calls([("f", "{}")])
        return whole.replace(FORMATS[form].after_name + style.empty, FORMATS[form].after_name + body)

    def value(*values: tuple[str, str, bool]) -> Any:
        text = call(*values)
        assert is_admitted(grammar, text)
        return json.loads(read_calls(plan, text)[1][0].arguments)

    assert value(("text", "null", True), ("maybe", "null", True), ("mixed", "12", True)) == {
        "text": "null",
        "maybe": "null",
        "mixed": "12",
    }
    assert value(("text", "1", True), ("maybe", "null", False), ("mixed", "[1]", False), ("unit", "3", False)) == {
        "text": "1",
        "maybe": None,
        "mixed": [1],
        "unit": 3,
    }
    for wrong in (("text", "a", False), ("text", f"a{style.mark}b", True)):
        assert not is_admitted(grammar, call(wrong)), wrong
    for wrong in (("count", "1", True), ("unit", "C", False), ("flag", "True", False)):
        assert not is_admitted(grammar, call(("text", "a", True), wrong)), wrong


MARKS = {
    "deepseek_v32": ("｜DSML｜",),
    "gemma4": ("<|tool_call>", "<tool_call|>", GEMMA_QUOTE),
    "glm45": ("</arg_value>",),
}


def special_vocabulary(names: tuple[str, ...]) -> Vocabulary:
    tokens = (*(bytes([byte]) for byte in range(256)), b"</s>", *(name.encode() for name in names))
    return Vocabulary(tokens, frozenset(range(EOS, len(tokens))), (EOS,), len(tokens))


@pytest.mark.parametrize("form", MARKS)
def test_marks_that_are_special_tokens(form: str) -> None:
    """The marks are those tokens and not their letters; arguments still end within the budget."""
    vocabulary = special_vocabulary(MARKS[form])
    found = tool_output_format(TOOLS, "required", FORMATS[form], None, parallel=True)
    assert found is not None and found.tools is not None
    grammar = compile(found.spec, vocabulary)
    arguments = {"text": 'a "b" </', "maybe": "null", "list": ["x", ""], "object": {"a": None, "b": {"c": "[1"}}}
    text = FORMATS[form].calls([("f", json.dumps(arguments)), ("ping", "{}")])

    def accepts(tokens: list[int]) -> bool:
        matcher = grammar.matcher()
        return all(map(matcher.accept, tokens)) and matcher.can_end

    if form == "glm45":
        arguments["maybe"] = None
    assert accepts(vocabulary.tokenize_named(text)) and not accepts(vocabulary.tokenize(text.encode()))
    assert [json.loads(call.arguments) for call in read_calls(found.tools, text)[1]] == [arguments, {}]
    rng = random.Random(5)
    least = len(vocabulary.tokenize_named(FORMATS[form].calls([("ping", "{}")]))) + 3
    for _ in range(4):
        [*calls] = read_calls(found.tools, walked(grammar, "", rng, least + rng.randrange(60), vocabulary))[1]
        assert calls
        for call in calls:
            Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))


HEAVY = {"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$", "maxLength": 500}


@pytest.mark.parametrize("form", [name for name, form in FORMATS.items() if not form.is_object])
def test_forced_calls_end_within_any_budget_that_holds_the_shortest(form: str) -> None:
    """Calls in the model's own form, and whole ones, from the first token on."""
    found = tool_output_format(TOOLS, "required", FORMATS[form], None, parallel=True)
    assert found is not None and found.tools is not None
    grammar = compile(found.spec, VOCABULARY)
    rng = random.Random(3)
    least = len(FORMATS[form].calls([("ping", "{}")]).encode()) + 3
    for _ in range(4):
        _, calls = read_calls(found.tools, walked(grammar, "", rng, least + rng.randrange(60)))
        assert calls
        for call in calls:
            Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))


REFUSED = [
    ({"type": "object", "properties": {"a b": {"type": "string"}}, "minProperties": 1}, "minProperties"),
    ({"type": "object", "properties": {"a<b": {"type": "string"}}, "required": ["a<b"]}, "properties"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$", "maxLength": 500}},
        },
        "pattern",
    ),
]


@pytest.mark.parametrize(("schema", "keyword"), REFUSED)
@pytest.mark.parametrize("form", ["qwen3_coder", "pythonic"])
def test_what_a_style_cannot_enforce_is_refused_by_name(form: str, schema: dict[str, Any], keyword: str) -> None:
    tools = [Tool(type="function", function=Function(name="f", parameters=schema))]
    found = tool_output_format(tools, "auto", FORMATS[form], None, parallel=True)
    assert found is not None and found.tools is not None
    with pytest.raises(GrammarError) as caught:
        compile(found.spec, VOCABULARY)
    assert caught.value.keyword == keyword
    located = found.tools.locate(caught.value)
    assert located.param == "tools[0].function.parameters" and keyword in located.pointer
    with pytest.raises(GrammarRefused), found.locating_errors():
        raise GrammarRefused(caught.value.keyword, caught.value.pointer, caught.value.reason)


def test_a_style_in_a_structural_tag() -> None:
    """Clients may ask for the same grammars: XGrammar's ``style``."""

    def compiled(style: Any) -> CompiledGrammar:
        content = {"type": "json_schema", "json_schema": PARAMETERS, "style": style}
        return compile(
            GrammarSpec.structural_tag({"format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}),
            VOCABULARY,
        )

    assert is_admitted(compiled("qwen_xml"), "<<parameter=text>\na\n</parameter>\n>")
    assert is_admitted(compiled("json"), '<{"text": "a"}>')
    for style in ("yaml", 5, None):
        with pytest.raises(GrammarError) as caught:
            compiled(style)
        assert (
            caught.value.pointer == "/format/content/style" and "json, python, gemma, qwen_xml" in caught.value.reason
        )


def test_the_types_of_a_subschema_are_found_once() -> None:
    reads = 0

    class Counted(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            nonlocal reads
            reads += 1
            return super().__contains__(key)

    chain = {f"A{i}": Counted(anyOf=[Counted({"$ref": f"#/$defs/A{i + 1}"}) for _ in range(2)]) for i in range(10)}
    chain["A10"] = Counted(type="string")
    first = {name: Counted({"$ref": "#/$defs/A0"}) for name in ("p", "q")}
    cyclic = {"anyOf": [{"type": "string"}, {"$ref": "#/properties/r"}]}
    types = argument_types({"$defs": chain, "properties": {**first, "r": cyclic}})
    assert types["p"] == types["q"] == {"string"} < types["r"]
    assert reads < 200


@pytest.mark.parametrize("style", ["python", GEMMA, *XML_STYLES])
def test_a_name_without_an_end_is_searched_once(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = 0

    def count(number: int) -> None:
        nonlocal searched
        searched += number

    class CountedText(str):
        def __getitem__(self, key: Any) -> str:
            return CountedText(super().__getitem__(key))

        def find(self, mark: str, start: int = 0) -> int:  # type: ignore[override]
            count(len(self) - start)
            return super().find(mark, start)

        def partition(self, mark: str) -> tuple[str, str, str]:
            count(len(self))
            return super().partition(mark)

    class CountedPattern:
        def __init__(self, pattern: re.Pattern[str]) -> None:
            self.pattern = pattern

        def match(self, text: str, at: int = 0) -> re.Match[str] | None:
            found = self.pattern.match(text, at)
            count(found.end() - at if found else 1)
            return found

    for name, value in [*vars(argument_syntax).items()]:
        if isinstance(value, re.Pattern):
            monkeypatch.setattr(argument_syntax, name, CountedPattern(value))
    reader = argument_syntax.argument_reader(style, {})
    text = XML_STYLES[style].key_begin if style in XML_STYLES else ""
    for _ in range(500):
        text += "a"
        written, used, done = reader.read(CountedText(text))
        text = text[used:]
        assert not done and written in ("", "{")
    assert 0 < searched < 500 * 40  # each time the new letter, and as much before it as the end mark is long
