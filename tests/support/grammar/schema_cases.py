"""JSON Schemas with valid and invalid instances, refused schemas, and schemas for matchers."""

from __future__ import annotations

from typing import Any

DRAFT4 = "http://json-schema.org/draft-04/schema#"
DRAFT2019 = "https://json-schema.org/draft/2019-09/schema"
DRAFT7 = "http://json-schema.org/draft-07/schema#"
CLOSED = {"additionalProperties": False}
LIST_NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "next"],
    **CLOSED,
}
# (schema, instances that must be reachable, instances that must not be)
CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({}, [None, 1, "a", [1, {"a": []}], {"a": {"b": None}}], []),
    ({"type": "string"}, ["", 'q"\\\n\t', "é\U0001f600", "\x00\x1f"], [1, None]),
    ({"type": ["integer", "null"]}, [1, -20, None], [1.5, "1", True]),
    ({"type": "number"}, [0, -1.25, 1e20], ["1"]),
    ({"enum": ["a", 1, None, {"x": [1]}, [True, "b"]]}, ["a", 1, None, {"x": [1]}, [True, "b"]], ["b", {"x": []}, []]),
    ({"enum": ["abc", "de"], "maxLength": 2}, ["de"], ["abc"]),
    ({"const": 2.5}, [2.5], [2, 2.25]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é\U0001f600x"], ["a", "abcd"]),
    ({"minLength": 2}, ["ab", 1, None, {}], ["a"]),
    ({"type": "string", "pattern": "^a+$", "minLength": 2, "maxLength": 3}, ["aa", "aaa"], ["a", "aaaa", "ab"]),
    ({"type": "string", "pattern": "b"}, ["b", "abc", '"b'], ["a", ""]),
    ({"type": "string", "pattern": "^(v[0-9]*)?$"}, ["", "v12"], ["12"]),
    ({"type": "string", "pattern": "^(?!ab)[a-c]+$"}, ["ac", "b"], ["abc", "ab"]),
    ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb"], ["xa", "bx"]),
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, [-3, 0, 11], [-4, 12, 1.5]),
    ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 1.25}, [0.51, 1, 1.25], [0.5, 1.26, 0]),
    ({"minimum": 5}, [5, 5.5, "x", None], [4.5]),
    ({"type": "number", "minimum": 1, "exclusiveMinimum": True, "$schema": DRAFT4}, [1.5, 2], [1, 0]),
    ({"type": "integer", "multipleOf": 7, "minimum": 10}, [14, 700], [7, 15]),
    ({"type": "number", "multipleOf": 0.25}, [0.75, 2, -1.5], [0.3]),
    ({"type": "number", "multipleOf": 0.01}, [0.75, 2, -1.5, 19.98, 250000.25], [0.305, 4.35, 19.99]),
    ({"type": "number", "multipleOf": 0.3}, [0.3, 1.5, -6], [2.1, 1, 0.1]),
    ({"allOf": [{"multipleOf": 0.1}, {"multipleOf": 0.25}], "type": "number"}, [0.5, 12], [0.25, 0.1]),
    ({"type": "integer", "multipleOf": 0.7}, [7, 14], [1]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        [[1], [1, 2]],
        [[], [1, 2, 3], ["a"]],
    ),
    (
        {"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
        [[], ["a"], ["a", 1], 5],
        [["a", 1, 2], [1]],
    ),
    (
        {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 2},
        [[1, 2], [1, 2, 2]],
        [[1], [2, 2]],
    ),
    (
        {"$schema": DRAFT7, "type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}},
        [[], [1], [1, 2]],
        [[2], [1, 1]],
    ),
    (
        {"type": "array", "items": {"enum": ["a", "b", 3]}, "uniqueItems": True},
        [[], ["b", "a"], [3, "a", "b"]],
        [["a", "a"]],
    ),
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2}, [[1, 2], [2, 1]], [[1], [1, 1]]),
    ({"type": "array", "contains": {"const": 3}}, [[3], [1, 3], [3, 3]], [[], [1]]),
    (
        {"type": "array", "contains": {"const": 3}, "minContains": 2, "maxContains": 2},
        [[3, 3], [3, 1, 3]],
        [[3], [3, 3, 3]],
    ),
    ({"type": "array", "contains": {"const": 3}, "maxItems": 2}, [[1, 3], [3]], [[1, 1], [1, 1, 3]]),
    ({"allOf": [{"prefixItems": [{"const": 1}]}], "unevaluatedItems": False, "type": "array"}, [[], [1]], [[1, 2]]),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["b"]},
        [{"b": 1}, {"a": 1, "b": None}, {"b": 1, "z": 2}],
        [{}, {"a": 1}, {"a": "x", "b": 1}],
    ),
    ({"required": ["zz"]}, [{"zz": 1}, 5, {"zz": 1, "y": 2}], [{}, {"y": 1}]),
    ({"properties": {"a": False}, "type": "object"}, [{}, {"b": 1}], [{"a": 1}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1, "b": 2}], [{"a": "x"}]),
    (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 5}}},
        [{"ab": 6}, {"a": 1}, {"b": "x"}, {"c": None}],
        [{"ab": 4}, {"ab": 5.5}, {"a": "x"}, {"xb": 1}],
    ),
    (
        {"type": "object", "patternProperties": {"x": {"type": "null"}}, **CLOSED},
        [{}, {"axb": None}],
        [{"a": None}, {"x": 1}],
    ),
    ({"type": "object", "propertyNames": {"pattern": "^[a-z]{1,2}$"}}, [{}, {"ab": 1}], [{"abc": 1}, {"A": 1}]),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "minProperties": 2},
        [{"a": 1, "b": 2}],
        [{"a": 1}, {"c": 1}],
    ),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"c": 1}], [{}]),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1},
        [{}, {"b": 1}, {"c": 1}],
        [{"a": 1, "b": 1}],
    ),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    (
        {"type": "object", "dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}}},
        [{"b": "x"}, {"a": 1, "b": 2}],
        [{"a": 1, "b": "x"}],
    ),
    ({"$schema": DRAFT7, "type": "object", "dependencies": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    (
        {"type": "object", "allOf": [{"properties": {"a": {}}}, {"required": ["a"]}], "unevaluatedProperties": False},
        [{"a": 1}],
        [{"a": 1, "b": 2}, {}],
    ),
    ({"allOf": [{"type": "string"}, {"minLength": 1}, {"maxLength": 2}]}, ["a", "ab"], ["", "abc", 1]),
    (
        {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{}],
    ),
    (
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    ({"oneOf": [{"multipleOf": 5, "type": "integer"}, {"type": "string"}]}, [5, "x"], [1, None]),
    ({"oneOf": [{"minimum": 3}, {"maximum": 5}], "type": "integer"}, [2, 6], [3, 4, 5]),
    ({"not": {"type": ["string", "object"]}}, [1, None, []], ["a", {}]),
    ({"not": {"enum": ["bad", 1]}}, ["ok", 2, None, "ba"], ["bad", 1]),
    ({"type": "string", "not": {"pattern": "^a"}}, ["b", "", "ba"], ["a", "ab"]),
    ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    (
        {
            "type": "object",
            "properties": {"k": {"enum": ["x", "y"]}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "x"}}},
            "then": {"required": ["p"]},
            "else": {"required": ["q"]},
        },
        [{"k": "x", "p": 1}, {"k": "y", "q": 1}],
        [{"k": "x", "q": 1}, {"k": "y"}],
    ),
    (LIST_NODE, [{"v": 1, "next": None}, {"v": 1, "next": {"v": 2, "next": None}}], [{"v": 1}, {"v": 1, "next": {}}]),
    ({"$ref": "#/$defs/x~1y", "$defs": {"x/y": {"type": "integer"}}, "minimum": 3}, [3], [2, "a"]),
    (
        {"$schema": DRAFT7, "$ref": "#/definitions/i", "definitions": {"i": {"type": "integer"}}, "minimum": 3},
        [2],
        ["a"],
    ),
    # Keywords of other drafts.
    ({"$schema": DRAFT7, "prefixItems": [{"type": "integer"}], "items": {"type": "null"}}, [[None]], [[1]]),
    ({"$schema": DRAFT7, "contains": {"type": "null"}, "minContains": 0}, [[None], [1, None]], [[], [1]]),
    ({"$schema": DRAFT4, "not": {"const": 1, "type": "string"}}, [1, None], ["a"]),
    ({"$schema": DRAFT7, "not": {"prefixItems": [{"type": "null"}], "type": "array"}}, [1], [[], [1], [None]]),
    ({"$schema": DRAFT7, "items": {"$dynamicRef": "#nowhere"}}, [[1]], []),
    ({"items": {"$recursiveRef": "#"}, "type": "array"}, [[1], [[]]], [1]),
    ({"$schema": DRAFT7, "items": {"$recursiveRef": "#nowhere"}, "type": "array"}, [[1], [[]]], [1]),
    ({"$schema": DRAFT2019, "items": {"$recursiveRef": "#"}, "type": "array"}, [[], [[], [[]]]], [[1], 1]),
    (
        {"$schema": DRAFT2019, "$recursiveAnchor": True, "items": {"$recursiveRef": "#"}, "type": "array"},
        [[], [[], [[]]]],
        [[1], 1],
    ),
    ({"$ref": "#s", "$defs": {"q": {"$anchor": "s", "type": "string"}}}, ["a"], [1]),
    ({"$id": "http://x.y/root", "$ref": "item", "$defs": {"q": {"$id": "item", "type": "string"}}}, ["a"], [1]),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"type": "array", "items": {"$ref": "#"}}]}}},
        [[], [[], [[]]]],
        [1, [1]],
    ),
]
REFUSALS: list[tuple[Any, str, str]] = [
    ({"properties": {"a": {"type": "strin"}}}, "type", "/properties/a/type"),
    ({"minLength": "3"}, "minLength", "/minLength"),
    ({"anyOf": []}, "anyOf", "/anyOf"),
    ({"$schema": DRAFT2019, "items": {"$recursiveRef": "#/$defs/a"}}, "$recursiveRef", "/items/$recursiveRef"),
    ({"required": True}, "required", "/required"),
    ({"type": "string", "pattern": "("}, "pattern", "/pattern"),
    ({"items": {"pattern": r"(a)\1"}}, "pattern", "/items/pattern"),
    ({"pattern": r"\bfoo\b"}, "pattern", "/pattern"),
    ({"pattern": "(x{0,1000}){0,1000}"}, "pattern", "/pattern"),
    ({"properties": {"a/b": {"$ref": "#/nowhere"}}}, "$ref", "/properties/a~1b/$ref"),
    ({"$ref": "https://example.com/other.json"}, "$ref", "/$ref"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "$ref", "/$defs/a/$ref"),
    (
        {
            "$schema": DRAFT2019,
            "$recursiveAnchor": True,
            "items": {"$recursiveRef": "#"},
            "$defs": {"a": {"$id": "http://a/", "$recursiveAnchor": True, "items": {"$recursiveRef": "#"}}},
        },
        "$recursiveRef",
        "/items/$recursiveRef",
    ),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "required", "/required"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems", "/uniqueItems"),
    ({"type": "array", "uniqueItems": True, "items": {"enum": [1]}, "minItems": 2}, "uniqueItems", "/uniqueItems"),
    ({"type": "object", "minProperties": 3}, "minProperties", "/minProperties"),
    ({"minItems": 10**9}, "minItems", "/minItems"),
    ({"type": "integer", "multipleOf": 99999989}, "multipleOf", "/multipleOf"),
    ({"$schema": "http://json-schema.org/draft-03/schema#", "disallow": "string"}, "$schema", "/$schema"),
    ({"minimum": 0, "exclusiveMinimum": True}, "exclusiveMinimum", "/exclusiveMinimum"),
    ({"$schema": DRAFT4, "minimum": 5, "exclusiveMinimum": 1}, "exclusiveMinimum", "/exclusiveMinimum"),
    ({"$schema": DRAFT4, "oneOf": [{"const": 1}, {"const": 2}]}, "oneOf", "/oneOf"),
    ({"$schema": DRAFT4, "not": {"$ref": "#/a"}, "a": {"if": {}, "then": False}}, "not", "/not"),
    ({"not": {"dependencies": {"a": ["b"]}}}, "dependencies", "/not/dependencies"),
    ({"type": "integer", "not": {"multipleOf": 7}}, "multipleOf", "/not/multipleOf"),
    ({"enum": []}, "enum", "/enum"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "allOf", "/allOf"),
    (False, "false", ""),
]


SCHEMAS = [
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "n": {"type": "integer", "minimum": 3}},
        "required": ["name"],
    },
    {"type": "array", "items": {"anyOf": [{"type": "null"}, {"enum": ["ab", "aaa"]}, {"$ref": "#"}]}},
    {"type": "string", "pattern": "^a+b{2,3}(c|dd)*$"},
    {
        "type": "object",
        "properties": {"d": {"format": "date"}, "k": {"const": "long constant text"}},
        "required": ["k", "d"],
    },
    {"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]},
    {"type": "number"},
]
