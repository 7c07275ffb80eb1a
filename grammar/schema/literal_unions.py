"""Unions of literals (``anyOf`` of ``const``, as zod and TypeBox write them), which are one ``enum``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .json_types import BOOLEAN, INTEGER, NULL, NUMBER, STRING, TYPE_BITS
from .keywords import shape_error

_OF_LITERALS = frozenset(("const", "enum", "type"))
_SCALARS = (str, int, float, type(None))


def literal_values(schema: Any) -> list[Any] | None:
    """Return the scalars that a schema enumerates, if it has no other keyword but a type; None for any other schema."""
    if not isinstance(schema, dict) or not _OF_LITERALS.issuperset(schema) or ("const" in schema) == ("enum" in schema):
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list) or not all(isinstance(value, _SCALARS) for value in values):
        return None
    named = schema.get("type")
    if named is None:
        return values
    if shape_error("type", named):
        return None
    types = 0
    for name in [named] if isinstance(named, str) else named:
        types |= TYPE_BITS[name]
    return [value for value in values if types & _type_of(value)]


def merged(branches: Sequence[Any]) -> tuple[list[tuple[int, Any]], list[list[Any]]]:
    """Return the branches that are not literals, with their numbers, and the values of each literal branch."""
    others: list[tuple[int, Any]] = []
    literals: list[list[Any]] = []
    for number, branch in enumerate(branches):
        values = literal_values(branch)
        if values is None:
            others.append((number, branch))
        else:
            literals.append(values)
    return others, literals


def of_one_branch(literals: Iterable[Sequence[Any]]) -> list[Any]:
    """Return the values that are in exactly one of some enumerations; 1, 1.0 and true are distinguished as in JSON."""
    counts: dict[Any, int] = {}
    kept: dict[Any, Any] = {}
    for values in literals:
        for key, value in {_key(value): value for value in values}.items():
            counts[key] = counts.get(key, 0) + 1
            kept.setdefault(key, value)
    return [value for key, value in kept.items() if counts[key] == 1]


def _key(value: Any) -> tuple[str, Any]:
    return ("boolean" if isinstance(value, bool) else "value"), value


def _type_of(value: Any) -> int:
    if value is None:
        return NULL
    if isinstance(value, bool):
        return BOOLEAN
    if isinstance(value, str):
        return STRING
    return INTEGER if value == int(value) else NUMBER & ~INTEGER
