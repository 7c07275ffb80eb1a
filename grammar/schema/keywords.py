"""JSON Schema keywords: whether each is enforced or an annotation, its drafts, and the shape of its value.

Every keyword of the specification is enforced, except those that are annotations by the specification. The table in the
documentation is generated from `KEYWORDS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Treatment(StrEnum):
    """How a keyword is treated."""

    ENFORCED = "enforced"
    ANNOTATION = "annotation"


@dataclass(frozen=True, slots=True)
class Keyword:
    """One row of the table.

    Attributes:
        treatment: how the keyword is treated.
        note: in which cases the implementation admits less than the specification, or refuses the schema.
        shape: shape that the keyword's value must have, in words; ``""`` for anything.
    """

    treatment: Treatment
    note: str = ""
    shape: str = ""


_E, _A = Treatment.ENFORCED, Treatment.ANNOTATION

_ANNOTATIONS = (
    "$schema $id id $anchor $dynamicAnchor $recursiveAnchor $vocabulary $comment $defs definitions title description "
    "default examples deprecated readOnly writeOnly contentEncoding contentMediaType contentSchema"
)

KEYWORDS: dict[str, Keyword] = {
    "type": Keyword(_E, "", "a type name or a list of type names"),
    "enum": Keyword(_E, "one spelling per number; keys of an object in the given order", "a list"),
    "const": Keyword(_E, "like enum"),
    # strings
    "minLength": Keyword(_E, "", "a non-negative integer"),
    "maxLength": Keyword(_E, "", "a non-negative integer"),
    "pattern": Keyword(
        _E, "no back-reference, no word boundary, no lookbehind; lookahead only at the beginning", "a pattern"
    ),
    "format": Keyword(_E, "the formats in the table below; other formats are annotations", "a string"),
    # numbers
    "minimum": Keyword(_E, "bounded numbers are written without an exponent", "a number"),
    "maximum": Keyword(_E, "bounded numbers are written without an exponent", "a number"),
    "exclusiveMinimum": Keyword(_E, "a boolean in draft 4", "a number or a boolean"),
    "exclusiveMaximum": Keyword(_E, "a boolean in draft 4", "a number or a boolean"),
    "multipleOf": Keyword(
        _E,
        "only multiples in exact arithmetic that are also multiples in floating-point arithmetic: to most validators "
        "4.35 is not a multiple of 0.01. For steps below 1/1000 and similar ones only some multiples; at most 10000 "
        "(5000 without its factors 2 and 5) and nine decimal places",
        "a positive number",
    ),
    # arrays
    "items": Keyword(_E, "also the list form of earlier drafts", "a schema or a list of schemas"),
    "prefixItems": Keyword(_E, "", "a list of schemas"),
    "additionalItems": Keyword(_E, "", "a schema"),
    "minItems": Keyword(_E, "", "a non-negative integer"),
    "maxItems": Keyword(_E, "", "a non-negative integer"),
    "uniqueItems": Keyword(
        _E,
        "not with prefixItems or contains",
        "a boolean",
    ),
    "contains": Keyword(_E, "one per array, with up to 200 positions to distinguish", "a schema"),
    "minContains": Keyword(_E, "", "a non-negative integer"),
    "maxContains": Keyword(_E, "", "a non-negative integer"),
    "unevaluatedItems": Keyword(_E, "not with contains; otherwise like unevaluatedProperties", "a schema"),
    # objects
    "properties": Keyword(_E, "keys in the order of the schema, before all other keys", "an object of schemas"),
    "patternProperties": Keyword(
        _E,
        "with four or more patterns, keys that match several of them are excluded",
        "an object of schemas by pattern",
    ),
    "additionalProperties": Keyword(_E, "", "a schema"),
    "required": Keyword(_E, "", "a list of strings"),
    "minProperties": Keyword(_E, "", "a non-negative integer"),
    "maxProperties": Keyword(_E, "", "a non-negative integer"),
    "propertyNames": Keyword(_E, "", "a schema"),
    "dependentRequired": Keyword(_E, "", "an object of lists of strings"),
    "dependentSchemas": Keyword(_E, "", "an object of schemas"),
    "dependencies": Keyword(_E, "", "an object of schemas or lists of strings"),
    "unevaluatedProperties": Keyword(
        _E, "with more than four anyOf branches, only one branch at a time counts", "a schema"
    ),
    # applicators
    "allOf": Keyword(_E, "", "a list of schemas"),
    "anyOf": Keyword(_E, "", "a list of schemas"),
    "oneOf": Keyword(
        _E,
        "branches are made disjoint; values that only an unsupported negation would distinguish are excluded, or the "
        "schema is refused if that excludes a whole branch",
        "a list of schemas",
    ),
    "not": Keyword(
        _E,
        "of multipleOf only for integers whose prime factors are 2, 5 and at most one 3; not of uniqueItems, "
        "propertyNames or undeclared keys; of format, similar strings are excluded too",
        "a schema",
    ),
    "if": Keyword(_E, "like not", "a schema"),
    "then": Keyword(_E, "", "a schema"),
    "else": Keyword(_E, "", "a schema"),
    # references
    "$ref": Keyword(_E, "within the schema, or to a standard meta-schema", "a string"),
    "$dynamicRef": Keyword(_E, "if it can refer to only one place", "a string"),
    "$recursiveRef": Keyword(_E, "in draft 2019-09 like $dynamicRef; in any other draft an annotation", "'#'"),
    # annotations and bookkeeping
    **dict.fromkeys(_ANNOTATIONS.split(), Keyword(_A)),
}

# The draft that a keyword came with, and the last that had it.
_SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("minContains", "maxContains", "dependentRequired", "dependentSchemas"), 2019),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), 2019),
    **dict.fromkeys(("$dynamicRef", "prefixItems"), 2020),
    "$recursiveRef": 2019,
}
_UNTIL = {"dependencies": 7, "$recursiveRef": 2019}
_LIMITED = frozenset((*_SINCE, *_UNTIL))
# Keywords whose meaning depends on the draft, unless they are ignored.
DRAFTED = frozenset(("dependencies", "exclusiveMinimum", "exclusiveMaximum"))
_REFERENCES = ("$dynamicRef", "$recursiveRef")

_JSON_NAMES: dict[type, str] = {dict: "an object", list: "a list"}
_TYPE_NAMES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "a type name or a list of type names": lambda v: (
        (isinstance(v, str) and v in _TYPE_NAMES) or (_is_strings(v) and bool(v) and _TYPE_NAMES.issuperset(v))
    ),
    "a list": lambda v: isinstance(v, list),
    "a non-negative integer": _is_count,
    "a pattern": lambda v: isinstance(v, str),
    "a string": lambda v: isinstance(v, str),
    "'#'": lambda v: v == "#",
    "a number": _is_number,
    "a number or a boolean": lambda v: isinstance(v, bool) or _is_number(v),
    "a positive number": lambda v: _is_number(v) and v > 0,
    "a boolean": lambda v: isinstance(v, bool),
    "a schema": _is_schema,
    "a schema or a list of schemas": lambda v: _is_schema(v) or (isinstance(v, list) and all(map(_is_schema, v))),
    "a list of schemas": lambda v: isinstance(v, list) and bool(v) and all(map(_is_schema, v)),
    "an object of schemas": lambda v: isinstance(v, dict) and all(map(_is_schema, v.values())),
    "an object of schemas by pattern": lambda v: isinstance(v, dict) and all(map(_is_schema, v.values())),
    "a list of strings": _is_strings,
    "an object of lists of strings": lambda v: isinstance(v, dict) and all(map(_is_strings, v.values())),
    "an object of schemas or lists of strings": lambda v: (
        isinstance(v, dict) and all(_is_schema(item) or _is_strings(item) for item in v.values())
    ),
}


def of_draft(schema: dict[str, Any], draft: int, *, negates: bool, tracks_evaluation: bool) -> dict[str, Any]:
    """Return a schema without those keywords of other drafts that its own draft ignores as unknown.

    Enforcing a keyword of another draft is sound if it only makes the answers fewer: a validator that does not know the
    keyword admits them too. So such a keyword is enforced, except where it is not sound: if the schema may be negated,
    if another keyword in it has changed its meaning between the drafts, or if the keyword would evaluate items for an
    ``unevaluatedItems`` that its own draft has. References of another draft are never followed.

    Args:
        schema: the object that has the keywords.
        draft: 4, 6, 7, 2019 or 2020.
        negates: whether the schema may be negated, as in ``oneOf``, ``not``, ``if`` or ``contains``.
        tracks_evaluation: whether the document has ``unevaluatedProperties`` or ``unevaluatedItems``.
    """
    if _LIMITED.isdisjoint(schema):
        return schema

    def is_passed_over(keyword: str) -> bool:
        if keyword not in _LIMITED or keyword == "dependencies" or _is_of(keyword, draft):
            return False
        if keyword == "prefixItems" and ("items" in schema or (tracks_evaluation and draft >= 2019)):
            return True
        return negates or keyword in _REFERENCES or (keyword == "minContains" and schema[keyword] == 0)

    return {keyword: value for keyword, value in schema.items() if not is_passed_over(keyword)}


def _is_of(keyword: str, draft: int) -> bool:
    return _SINCE.get(keyword, 0) <= draft <= _UNTIL.get(keyword, draft)


def draft_error(
    keyword: str, schema: dict[str, Any], draft: int, *, negates: bool, tracks_evaluation: bool
) -> str | None:
    """Return the fault of a keyword whose meaning depends on the draft, in the draft that the schema names, or None.

    Many validators enforce ``dependencies`` in later drafts, in which it is an unknown keyword. Enforcing it is sound
    only if the schema cannot be negated, and if no ``unevaluatedProperties`` asks what it evaluates.

    Args:
        keyword: one of `KEYWORDS`.
        schema: the object that has it.
        draft: 4, 6, 7, 2019 or 2020.
        negates: whether the schema may be negated, as in ``oneOf``, ``not``, ``if`` or ``contains``.
        tracks_evaluation: whether the document has ``unevaluatedProperties`` or ``unevaluatedItems``.
    """
    if keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        if draft >= 6 and isinstance(schema[keyword], bool):
            return "must be a number; a boolean is only valid in draft 4, which '$schema' does not name"
        closed = keyword.replace("exclusiveM", "m")
        if draft == 4 and not isinstance(schema[keyword], bool) and closed in schema:
            return f"must be a boolean with '{closed}' in draft 4"
    if keyword == "dependencies" and (negates or tracks_evaluation) and not _is_of(keyword, draft):
        return f"is not a keyword of the schema's draft ({draft}): validators disagree on its meaning here"
    return None


def shape_error(keyword: str, value: Any) -> str | None:
    """Return the fault in the shape of the value of one of ``KEYWORDS``, or None."""
    shape = KEYWORDS[keyword].shape
    if not shape or _CHECKS[shape](value):
        return None
    given = _JSON_NAMES.get(type(value)) or json.dumps(value, ensure_ascii=False)
    return f"must be {shape}, not {given[:60]}"
