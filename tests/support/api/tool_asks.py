"""Tools, answers that call them, and the calls to be read out of each answer."""

from __future__ import annotations

from typing import Any

from support.api.bad.bad_structured import named, tool

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER, PING = tool("weather", description="Of a city.", parameters=CITY, strict=True), tool("ping")
TOOLS = [WEATHER, PING]
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
FORCED = '[{"name": "weather", "arguments": {"city": "Ulm"}}, {"name":"ping","arguments":{}}]'
SHORT = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("ping")]}}
CASES: list[tuple[Any, str, list[tuple[str, str]], str | None]] = [
    ("auto", ONE, [("weather", '{"city": "Ulm"}')], None),
    ("auto", TWO, [("weather", '{"city": "Ulm"}'), ("ping", "{}")], None),
    ("auto", "Well. " + TWO, [("weather", '{"city": "Ulm"}'), ("ping", "{}")], "Well."),
    ("auto", "No need to.", [], "No need to."),
    ("none", ONE, [], ONE),
    ("required", FORCED, [("weather", '{"city": "Ulm"}'), ("ping", "{}")], None),
    (named("weather"), '{"city":"Ulm"}', [("weather", '{"city":"Ulm"}')], None),
    (named("ping"), "{}", [("ping", "{}")], None),
    (SHORT, '[{"name":"ping","arguments":{}}]', [("ping", "{}")], None),
]
