"""Inputs that try to make a grammar's compile or its masks slow, large or wrong: each is a field of a request.

Other than the inputs of published reports they are made here, in families of growing size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_PATTERNS = (
    *(r"^(a+)+$", r"^(a|a)*$", r"^(a|aa)+b$", r"^([a-z]+)*\d$", r"^(.*)*$", r"^(.+)+x$", r"(x+x+)+y", r"^((a*)*)*$"),
    *(r"^(\w+\s?)*$", r"^(\d+)*\d+$", r"(?:(?:(?:a?){9}){9}){9}", r"^(a{1,9}){1,99}$", r".*a.{12}", r".*a.{40}"),
    *(r"(.*a){12}", r"(.*a){60}", r"(a|b)*a(a|b){18}", r"(a|b)*a(a|b){80}", r"[^a]{500}a", r"a{9999}", r"(ab?c?){800}"),
    *(r"(?=.*a)(?=.*b)(?=.*c).{3,60}", r"^(?!.*aa)(?!.*bb)[ab]{1,90}$", r"(?<=a)b", r"(a)\1", r"\bword\b", r"(?i)a"),
    *(r"[\s\S]{0,8000}", r"(\p{L}{1,99}\s){1,99}", r"[\u0000-\uffff]{900}", r"(é|ß|ç){0,900}", r"\p{Lu}+\p{Ll}+\p{N}*"),
    *(
        r"[z-a]",
        r"a{5,2}",
        r"a**",
        r"(?",
        r"[",
        r"\\",
        r"(?P<n>a)",
        r"\u{110000}",
        r"{1}",
        r"a{1}{2}{3}{4}",
        r"$^",
        r"^^$$",
    ),
    *("|".join(f"w{n}" for n in range(450)), "(" * 60 + "a" + ")" * 60, "(" * 900, "a?" * 600 + "a" * 600, "[" * 900),
    *("(a|" * 200 + "b" + ")" * 200, r"(\d{1,3}\.){99}\d", "(" + "|".join("ab" * n for n in range(1, 40)) + ")*"),
)
_LARGE: tuple[dict[str, Any], ...] = (
    *({keyword: size} for keyword in ("minLength", "minItems", "minProperties") for size in (9_000, 10**6, 10**12)),
    *({"type": "string", "maxLength": size} for size in (5_000, 8_192, 10**9, 10**30)),
    *({"type": "array", "maxItems": size, "items": {"const": 1}} for size in (5_000, 10**9, 10**30)),
    *({"type": "string", "minLength": size, "maxLength": size} for size in (2_000, 8_192)),
    *({"type": "array", "minItems": size, "items": {"type": "string", "minLength": 90}} for size in (90, 3_000)),
    *({"type": "integer", "multipleOf": size} for size in (7, 997, 9_973, 10_007, 1e-9, 1e-300, 10**40)),
    *({"type": "number", "minimum": low, "maximum": high} for low, high in ((1e-300, 1e300), (-1e308, 1e308), (5, 4))),
    *({"type": "integer", "minimum": 10**size} for size in (19, 100, 250, 1_000)),
    {"type": "object", "maxProperties": 900, "minProperties": 2},
    {"type": "array", "contains": {"type": "integer"}, "minContains": 900},
    {"type": "array", "contains": {"type": "integer"}, "minContains": 40, "maxContains": 45, "maxItems": 48},
    {"type": "array", "uniqueItems": True, "items": {"enum": list(range(60))}},
    {"type": "array", "uniqueItems": True, "items": {"enum": list(range(2_000))}},
    {"enum": [f"value {n}" * 4 for n in range(1_500)]},
    {"enum": ["x" * 60_000, "y"]},
    {"enum": [{f"k{n}": n} for n in range(400)]},
    {"not": {"enum": [str(n) for n in range(1_500)]}},
)


def _shapes() -> Iterator[Any]:
    """Schemas that grow by nesting, by branching and by reference."""
    for depth in (20, 60, 70, 5_000):
        yield _nested({"properties": {"a": None}, "required": ["a"], "type": "object"}, depth)
        yield _nested({"type": "array", "items": None, "minItems": 1}, depth)
        yield _nested({"anyOf": [None, {"type": "null"}]}, depth)
        yield _nested({"not": None}, depth)
    for count in (6, 12, 40):
        doubling = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(count)}
        yield {"$ref": "#/$defs/d0", "$defs": doubling | {f"d{count}": {"type": "integer"}}}
        either = {f"d{n}": {"oneOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"required": [f"r{n}"]}]} for n in range(count)}
        yield {"$ref": "#/$defs/d0", "$defs": either | {f"d{count}": {"type": "object"}}}
        yield {"allOf": [{"anyOf": [{"required": [f"a{n}"]}, {"required": [f"b{n}"]}]} for n in range(count)]}
        yield {"oneOf": [{"properties": {f"p{n}": {"minLength": n}}} for n in range(count)]}
        yield {"type": "object", "patternProperties": {f"a{n}.*b{n}": {"minimum": n} for n in range(count)}}
        yield {"dependentSchemas": {f"k{n}": {"required": [f"k{n + 1}"]} for n in range(count)}}
        yield {"allOf": [{"if": {"required": [f"k{n}"]}, "then": {"minProperties": n}} for n in range(count)]}
        yield {"anyOf": [{"prefixItems": [{"const": n}]} for n in range(count)], "unevaluatedItems": False}
    for count in (100, 900, 1_001):
        yield {"type": "object", "properties": {f"p{n}": {"type": "string", "maxLength": 90} for n in range(count)}}
        yield {"type": "object", "required": [f"p{n}" for n in range(count)], "additionalProperties": False}
        yield {"type": "object", "propertyNames": {"enum": [f"p{n}" for n in range(count)]}, "minProperties": 9}
    yield {"$ref": "#"}
    yield {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}
    yield {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}, "required": ["a", "b"]}
    yield {"not": {"$ref": "#"}}
    yield {"if": {"$ref": "#"}, "then": {}}
    yield {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    yield {"$ref": "http://127.0.0.1:1/schema.json"}
    yield {"$ref": "file:///etc/passwd"}
    yield {"x-guidance": {"lenient": True, "whitespace_pattern": "(a+)+"}, "type": "object", "not": {"required": ["a"]}}
    yield {"properties": {"\u0000": {"type": "string"}, "\\": {}, '"': {}, "\u2028": {}}}
    yield {"$schema": "http://json-schema.org/draft-04/schema#", "id": "#x" * 900, "items": {"$ref": "#x"}}


def _nested(level: dict[str, Any], depth: int) -> str:
    head, _, tail = json.dumps(level).partition("null")
    return head * depth + "{}" + tail * depth


_LARK = (
    *("start: start", 'start: start "a" | "b"', 'start: "a" start start | ""', "start: A\nA: /(a+)+b/", "start: B"),
    *(
        "start: " + "(" * 400 + '"a"' + ")" * 400,
        "start: A\nA: /.{5000}/",
        'start: "a"{100000}',
        'start: ("a"{900}){900}',
    ),
    *("start: " + " | ".join(f'"w{n}"' for n in range(4_000)), "start: " + " ".join(["A"] * 4_000) + "\nA: /a?/"),
    *("start: %json {}", '%llguidance {"no_forcing": false}\nstart: "a"', "start: <[0]>", 'start[max_tokens=1]: "a"'),
    "\n".join(f'r{n}: r{n + 1} r{n + 1} | "x"' for n in range(30)) + '\nr30: "x"\nstart: r0',
    "start: A+\nA: /[\\s\\S]/ & ~/(?s:.*)(?:ab|ba){9}(?s:.*)/",
)
_EBNF = (
    *(
        "root ::= root",
        'root ::= root "a" | "b"',
        'root ::= ("a"*)*',
        'root ::= "a"{1,99999}',
        "root ::= x",
        "root ::=",
    ),
    *("root ::= " + "(" * 9_000 + '"a"' + ")" * 9_000, "root ::= " + " | ".join(f'"w{n}"' for n in range(3_000))),
    "root ::= [" + "a-z" * 900 + "]*",
)
_TEXT = {"type": "any_text"}
_TAGS: tuple[Any, ...] = (
    {"format": {"type": "sequence", "elements": [_TEXT] * 500}},
    {"format": {"type": "or", "elements": [{"type": "regex", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(20)]}},
    {"format": {"type": "triggered_tags", "triggers": [f"<{n}>" for n in range(400)],
                "tags": [{"begin": f"<{n}>", "content": _TEXT, "end": "</>"} for n in range(400)]}},
    {"format": {"type": "triggered_tags", "triggers": ["a" * 4_000],
                "tags": [{"begin": "a" * 4_000, "content": _TEXT, "end": "b" * 4_000}]}},
    {"format": {"type": "tags_with_separator", "separator": "", "tags": [{"begin": "a", "content": _TEXT, "end": ""}]}},
    {"format": {"type": "const_string", "value": "x" * 60_000}},
    {"structures": [{"begin": "<", "schema": {"$ref": "#"}, "end": ">"}], "triggers": ["<"]},
)  # fmt: skip


def inputs() -> list[tuple[str, dict[str, Any]]]:
    """Each input as its name and the field of a request that carries it."""
    found: list[tuple[str, dict[str, Any]]] = []
    families: tuple[tuple[str, Any, Any], ...] = (
        ("pattern", _PATTERNS, lambda text: {"guided_json": {"type": "string", "pattern": text}}),
        ("regex", _PATTERNS, lambda text: {"regex": text}),
        ("key pattern", _PATTERNS[:20], lambda text: {"guided_json": {"patternProperties": {text: {"const": 1}}}}),
        ("size", _LARGE, lambda schema: {"guided_json": schema}),
        ("shape", _shapes(), lambda schema: {"guided_json": schema}),
        ("lark", _LARK, lambda text: {"structured_outputs": {"grammar": text}}),
        ("ebnf", _EBNF, lambda text: {"ebnf": text}),
        ("tag", _TAGS, lambda tag: {"structured_outputs": {"structural_tag": tag}}),
        ("choice", ([f"c{n}" for n in range(5_000)], ["x" * 70_000], ["a" * n for n in range(1, 300)]),
         lambda options: {"guided_choice": options}),
    )  # fmt: skip
    for family, listed, field_of in families:
        found += [(f"{family} {number}", field_of(value)) for number, value in enumerate(listed)]
    return found
