"""Wrong requests for structured outputs and tools, as rows of the table in ``bad_inputs``."""

from __future__ import annotations

from typing import Any

Case = tuple[str, dict[str, Any], str | None, str | None]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MISSING, UNKNOWN, TYPE, VALUE = "missing_required_parameter", "unknown_parameter", "invalid_type", "invalid_value"

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"items": DEEP}
BROAD = {"enum": [str(number) for number in range(11_000)]}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


FORM = "response_format"
FORMATS: list[tuple[Any, str, str]] = [
    ("text", FORM, TYPE),
    (["text"], FORM, TYPE),
    (5, FORM, TYPE),
    ({}, f"{FORM}.type", MISSING),
    ({"type": None}, f"{FORM}.type", MISSING),
    ({"type": 5}, f"{FORM}.type", VALUE),
    ({"type": "xml"}, f"{FORM}.type", VALUE),
    ({"type": "text", "x": 1}, f"{FORM}.x", UNKNOWN),
    ({"type": "json_schema"}, f"{FORM}.json_schema", VALUE),
    ({"type": "json_object", "json_schema": {"schema": {}}}, f"{FORM}.json_schema", VALUE),
    ({"type": "json_object", "format": {}}, f"{FORM}.format", VALUE),
    ({"type": "json_schema", "json_schema": "x"}, f"{FORM}.json_schema", TYPE),
    ({"type": "json_schema", "json_schema": {}}, f"{FORM}.json_schema.schema", MISSING),
    ({"type": "json_schema", "json_schema": {"name": "x"}}, f"{FORM}.json_schema.schema", MISSING),
    ({"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}, f"{FORM}.json_schema.name", TYPE),
    ({"type": "json_schema", "json_schema": {"strict": 1, "schema": {}}}, f"{FORM}.json_schema.strict", TYPE),
    ({"type": "json_schema", "json_schema": {"schema": "{}"}}, f"{FORM}.json_schema.schema", VALUE),
    ({"type": "json_schema", "json_schema": {"schema": []}}, f"{FORM}.json_schema.schema", VALUE),
    ({"type": "json_schema", "json_schema": {"schema": 5}}, f"{FORM}.json_schema.schema", VALUE),
    ({"type": "structural_tag"}, f"{FORM}.format", VALUE),
    ({"type": "structural_tag", "format": []}, f"{FORM}.format", TYPE),
    ({"type": "structural_tag", "format": {}, "structures": []}, f"{FORM}.structures", VALUE),
    ({"type": "structural_tag", "structures": []}, f"{FORM}.triggers", VALUE),
    ({"type": "structural_tag", "format": {}, "triggers": []}, f"{FORM}.triggers", VALUE),
]

# Which limits there are and how they are counted is grammar's; that they hold before the engine sees a request is ours.
ABSURD: list[tuple[dict[str, Any], str]] = [
    (schema_format(DEEP), FORM),
    (schema_format(BROAD), FORM),
    (schema_format({"const": "x" * 600_000}), FORM),
    (schema_format({"pattern": "a" * 3_000}), FORM),
    (schema_format({"properties": {str(number): {} for number in range(1_500)}}), FORM),
    (schema_format({"anyOf": [{}] * 300}), FORM),
    ({"guided_json": DEEP}, "guided_json"),
    ({"guided_regex": "a" * 100_000}, "guided_regex"),
    ({"guided_choice": ["x"] * 10 + [str(number) for number in range(11_000)]}, "guided_choice"),
    ({"guided_choice": ["x" * 300_000]}, "guided_choice"),
    ({"guided_grammar": "start: " + "x" * 100_000}, "guided_grammar"),
    ({"ebnf": "root ::= " + "x" * 100_000}, "ebnf"),
    ({"regex": "a" * 100_000}, "regex"),
    ({"structured_outputs": {"json": DEEP}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a" * 100_000}}, "structured_outputs.regex"),
    (
        {"structured_outputs": {"structural_tag": {"format": {"x": "y" * 600_000}}}},
        "structured_outputs.structural_tag",
    ),
]

OUT = "structured_outputs"
OUTPUTS: list[tuple[Any, str, str]] = [
    ("x", OUT, TYPE),
    ([], OUT, TYPE),
    ({}, OUT, VALUE),
    ({"json": None}, OUT, VALUE),
    ({"json_object": False}, OUT, VALUE),
    ({"x": 1}, f"{OUT}.x", UNKNOWN),
    ({"json": {}, "disable_any_whitespace": True}, f"{OUT}.disable_any_whitespace", UNKNOWN),
    ({"json": {}, "regex": "a"}, f"{OUT}.regex", VALUE),
    ({"choice": ["a"], "json_object": True}, f"{OUT}.json_object", VALUE),
    ({"json": 5}, f"{OUT}.json", VALUE),
    ({"json": []}, f"{OUT}.json", VALUE),
    ({"json": ""}, f"{OUT}.json", VALUE),
    ({"json": "{"}, f"{OUT}.json", VALUE),
    ({"json": "[]"}, f"{OUT}.json", VALUE),
    ({"json": '{"a": NaN}'}, f"{OUT}.json", VALUE),
    ({"json": '{"type": "object", "type": "array"}'}, f"{OUT}.json", VALUE),
    ({"regex": 5}, f"{OUT}.regex", TYPE),
    ({"regex": ""}, f"{OUT}.regex", VALUE),
    ({"regex": "a\0"}, f"{OUT}.regex", VALUE),
    ({"choice": "a"}, f"{OUT}.choice", TYPE),
    ({"choice": []}, f"{OUT}.choice", VALUE),
    ({"choice": [""]}, f"{OUT}.choice", VALUE),
    ({"choice": [5]}, f"{OUT}.choice[0]", TYPE),
    ({"choice": ["a", None]}, f"{OUT}.choice[1]", TYPE),
    ({"grammar": 5}, f"{OUT}.grammar", TYPE),
    ({"grammar": ""}, f"{OUT}.grammar", VALUE),
    ({"grammar": "neither the one nor the other"}, f"{OUT}.grammar", VALUE),
    ({"json_object": "yes"}, f"{OUT}.json_object", TYPE),
    ({"structural_tag": 5}, f"{OUT}.structural_tag", VALUE),
    ({"structural_tag": "{"}, f"{OUT}.structural_tag", VALUE),
    ({"structural_tag": "[]"}, f"{OUT}.structural_tag", VALUE),
]

ALIASES: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": 5}, "guided_json", VALUE),
    ({"guided_json": "{"}, "guided_json", VALUE),
    ({"guided_json": []}, "guided_json", VALUE),
    ({"guided_regex": 5}, "guided_regex", TYPE),
    ({"guided_regex": ""}, "guided_regex", VALUE),
    ({"guided_choice": "a"}, "guided_choice", TYPE),
    ({"guided_choice": []}, "guided_choice", VALUE),
    ({"guided_choice": [1]}, "guided_choice[0]", TYPE),
    ({"guided_grammar": {}}, "guided_grammar", TYPE),
    ({"guided_grammar": ""}, "guided_grammar", VALUE),
    ({"guided_grammar": "hello"}, "guided_grammar", VALUE),
    ({"regex": []}, "regex", TYPE),
    ({"regex": ""}, "regex", VALUE),
    ({"ebnf": 5}, "ebnf", TYPE),
    ({"ebnf": ""}, "ebnf", VALUE),
    ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern", "unsupported_parameter"),
    ({"guided_temperature": 1}, "guided_temperature", UNKNOWN),
]

# All that ask for a form, in the order in which they are named: any two contradict each other.
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["a"]}},
    {"guided_json": {}},
    {"guided_regex": "a"},
    {"guided_choice": ["a"]},
    {"guided_grammar": "root ::= 'a'"},
    {"regex": "a"},
    {"ebnf": "root ::= 'a'"},
]
PAIRS = [(one | other, next(iter(other))) for at, one in enumerate(FORMS) for other in FORMS[at + 1 :]]


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


F = "tools[0].function"
TOOLS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": "x"}, "tools", TYPE),
    ({"tools": {}}, "tools", TYPE),
    ({"tools": [5]}, "tools[0]", TYPE),
    ({"tools": [{}]}, "tools[0].type", MISSING),
    ({"tools": [{"type": "function"}]}, F, MISSING),
    ({"tools": [{"type": "custom", "name": 5}]}, "tools[0].custom", MISSING),
    ({"tools": [{"type": "custom", "custom": {"name": 5}}]}, "tools[0].custom.name", "invalid_type"),
    ({"tools": [{"type": 5, "function": {"name": "f"}}]}, "tools[0].type", VALUE),
    ({"tools": [{"type": "function", "function": {}}]}, f"{F}.name", MISSING),
    ({"tools": [{"type": "function", "function": "f"}]}, F, TYPE),
    ({"tools": [tool(x=1)]}, f"{F}.x", UNKNOWN),
    ({"tools": [tool(5)]}, f"{F}.name", TYPE),
    ({"tools": [tool("")]}, f"{F}.name", VALUE),
    ({"tools": [tool("a b")]}, f"{F}.name", VALUE),
    ({"tools": [tool('a"')]}, f"{F}.name", VALUE),
    ({"tools": [tool("a" * 129)]}, f"{F}.name", VALUE),
    ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name", VALUE),
    ({"tools": [tool(description=5)]}, f"{F}.description", TYPE),
    ({"tools": [tool(strict="yes")]}, f"{F}.strict", TYPE),
    ({"tools": [tool(parameters=5)]}, f"{F}.parameters", TYPE),
    ({"tools": [tool(parameters="{}")]}, f"{F}.parameters", TYPE),
    ({"tools": [tool(parameters={"type": "string"})]}, f"{F}.parameters.type", VALUE),
    ({"tools": [tool(parameters={"type": ["object", "null"]})]}, f"{F}.parameters.type", VALUE),
    ({"tools": [tool(parameters={"properties": {"a": DEEP}})]}, f"{F}.parameters", VALUE),
    ({"tools": [tool("g"), tool(parameters={"properties": {"a": BROAD}})]}, "tools[1].function.parameters", VALUE),
    ({"tools": [tool(f"f{number}") for number in range(257)]}, "tools", VALUE),
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"tool_choice": "required", "tools": []}, "tool_choice", VALUE),
    ({"tool_choice": named("f")}, "tool_choice", VALUE),
    ({"tool_choice": named("g"), "tools": [tool()]}, "tool_choice", VALUE),
    ({"tool_choice": named(5), "tools": [tool()]}, "tool_choice.function.name", TYPE),
    ({"tool_choice": {}, "tools": [tool()]}, "tool_choice.type", MISSING),
    ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice.function", MISSING),
    ({"tool_choice": {"type": "custom"}, "tools": [tool()]}, "tool_choice.custom", MISSING),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [tool()]}, "tool_choice.allowed_tools", MISSING),
    (
        {
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            "tools": [tool()],
        },
        "tool_choice.allowed_tools.tools",
        VALUE,
    ),
    (
        {
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("g")]}},
            "tools": [tool()],
        },
        "tool_choice",
        VALUE,
    ),
    (
        {"tool_choice": "required", "tools": [tool(n, parameters={"$id": "http://x/y"}) for n in "ab"]},
        "tools[1].function.parameters.$id",
        VALUE,
    ),
    ({"tool_choice": "any", "tools": [tool()]}, "tool_choice", VALUE),
    ({"tool_choice": 5, "tools": [tool()]}, "tool_choice", VALUE),
    ({"tool_choice": [], "tools": [tool()]}, "tool_choice", VALUE),
    ({"parallel_tool_calls": "no", "tools": [tool()]}, "parallel_tool_calls", TYPE),
    ({"tools": [tool()], "guided_regex": "a"}, "guided_regex", VALUE),
    ({"tools": [tool()], "structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice", VALUE),
    ({"tools": [tool()], "include_stop_str_in_output": True}, "include_stop_str_in_output", VALUE),
]

CASES: list[Case] = [
    *((path, {FORM: value}, param, code) for path in (CHAT, COMPLETIONS) for value, param, code in FORMATS),
    *((path, {OUT: value}, param, code) for path in (CHAT, COMPLETIONS) for value, param, code in OUTPUTS),
    *((path, fields, param, code) for path in (CHAT, COMPLETIONS) for fields, param, code in ALIASES),
    *((path, fields, param, VALUE) for path in (CHAT, COMPLETIONS) for fields, param in ABSURD),
    *((path, fields, param, VALUE) for path in (CHAT, COMPLETIONS) for fields, param in PAIRS),
    *(
        (path, form | {"include_stop_str_in_output": True}, "include_stop_str_in_output", VALUE)
        for path in (CHAT, COMPLETIONS)
        for form in FORMS
    ),
    *((CHAT, fields, param, code) for fields, param, code in TOOLS),
    (COMPLETIONS, {"tools": []}, "tools", UNKNOWN),
    ("/tokenize", {"prompt": "x", "tools": [tool()]}, "tools", VALUE),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [5]}, "tools[0]", TYPE),
]
