"""Golden calls of each format: text as the models' own chat templates render it, and as other servers' parsers read it.

Each file of ``data/tool_calls`` says what its text was made from, and whose parsers read the same calls from it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.api.tool_templates import TEMPLATES

from rootgraft.api.protocol.tools import Function, Tool
from rootgraft.api.structured.tool_formats import FORMATS
from rootgraft.api.structured.tool_grammar import tool_output_format
from rootgraft.api.structured.tool_parser import read_calls
from rootgraft.engine.text.chat_template import ChatTemplates
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.vocabulary import Vocabulary

FILES = sorted((Path(__file__).parent / "data" / "tool_calls").glob("*.json"))
VOCABULARY = Vocabulary((*(bytes([byte]) for byte in range(256)), b"</s>"), frozenset({256}), (256,), 257)
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "extra": {"type": "object"},
    },
    "required": ["city"],
}
TOOLS = [
    Tool(type="function", function=Function(name="get_weather", parameters=CITY)),
    Tool(type="function", function=Function(name="ping", parameters={"type": "object", "properties": {}})),
]


def test_there_is_a_file_for_each_format() -> None:
    assert {path.stem for path in FILES} == {*FORMATS} - {"generic"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_calls(path: Path) -> None:
    golden = json.loads(path.read_text())
    form = FORMATS[path.stem]
    found = tool_output_format(TOOLS, "auto", form, None, parallel=True)
    assert found is not None and found.tools is not None
    content, calls = read_calls(found.tools, golden["text"])
    assert not content
    assert [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls] == golden["calls"]
    matcher = compile(found.spec, VOCABULARY).matcher()
    assert all(map(matcher.accept, golden["text"].encode())) and matcher.can_end
    written = form.calls([(call.name, call.arguments) for call in calls])
    assert written.replace("True", "true") == golden["text"].replace("True", "true")


def _parameters(text: str, mark: str) -> dict[str, Any]:
    """Read parameters by an expression of name, type and value; without a type, from the schema."""
    types = {name: schema["type"] for name, schema in CITY["properties"].items()}
    return {
        found["key"]: found["value"]
        if (found.groupdict().get("type") or types[found["key"]]) == "string"
        else json.loads(found["value"])
        for found in re.finditer(mark, text, re.DOTALL)
    }


def _read(call: str, mark: str, text: str) -> list[dict[str, Any]]:
    return [
        {"name": found["name"], "arguments": _parameters(found["body"], mark)}
        for found in re.finditer(call, text, re.DOTALL)
    ]


# Parsers of their own for formats that no other server's parser was at hand for.
READERS = {
    "kimi_k3": lambda text: _read(
        r'<\|open\|>call tool="(?P<name>\w+)" index="\d"<\|sep\|>(?P<body>.*?)<\|close\|>call<\|sep\|>',
        r'<\|open\|>argument key="(?P<key>\w+)" type="(?P<type>\w+)"<\|sep\|>(?P<value>.*?)<\|close\|>argument<',
        text,
    ),
    "muse_glimmer": lambda text: _read(
        r' to=(?P<name>\w+)<\|message\|>(?P<body>.*?)</atem:function_calls>',
        r'<atem:parameter name="(?P<key>\w+)">(?P<value>.*?)</atem:parameter>',
        text,
    ),
    "command_r": lambda text: [
        {"name": each["tool_name"], "arguments": each["parameters"]}
        for each in json.loads(text.removeprefix("Action:\n```json").removesuffix("```"))
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_golden_calls_are_read_by_another_parser(name: str) -> None:
    golden = json.loads((FILES[0].parent / f"{name}.json").read_text())
    assert READERS[name](golden["text"]) == golden["calls"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_our_short_templates_write_the_same(path: Path) -> None:
    """The templates by which detection is tested have the shape of the golden texts."""
    golden = json.loads(path.read_text())
    calls = [
        {"id": f"functions.{call['name']}:{number}", "type": "function", "function": call}
        if path.stem == "kimi_k2"
        else {"id": f"{number:09}", "type": "function", "function": call}
        for number, call in enumerate(golden["calls"])
    ]
    if path.stem in ("deepseek_v31", "functionary_v32"):
        for call in calls:
            call["function"] = {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            }
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    text = ChatTemplates({"default": TEMPLATES[path.stem]}, {}).render([message], add_generation_prompt=False)
    for number in range(len(calls)):
        text = text.replace(f', "id": "{number:09}"', "")
    text = (
        text.removeprefix("<|start|>assistant").removesuffix("<|call|>").removeprefix(FORMATS[path.stem].recipient_mark)
    )
    assert text.replace("True", "true") == golden["text"].replace("True", "true")
