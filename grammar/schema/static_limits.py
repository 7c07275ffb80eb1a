"""Limits that hold before anything is compiled, all counted on the parsed grammar in one pass."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

from ..errors import GrammarError
from ..spec import GrammarKind, GrammarSpec
from .document import pointer_join
from .error_location import count_error, depth_error, size_error

_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_AS_BRACES = bytes.maketrans(b"[]", b"{}")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_CONTAINERS = (dict, list)
_COUNTED = ("properties", "patternProperties", "anyOf", "oneOf", "allOf", "pattern", "enum")


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a grammar may be.

    Attributes:
        schema_bytes: canonical bytes of a schema or structural tag.
        grammar_bytes: bytes of a regex, EBNF or Lark text.
        depth: JSON values inside each other.
        subschemas: objects in a schema.
        properties: properties of one object.
        enum_values: values of one ``enum``, and choices.
        enum_bytes: bytes of all ``enum`` and ``const`` values together, and of all choices.
        pattern_bytes: bytes of one pattern.
        branches: schemas in one ``anyOf``, ``oneOf`` or ``allOf``.
    """

    schema_bytes: int = 128 << 10
    grammar_bytes: int = 64 << 10
    depth: int = 64
    subschemas: int = 10_000
    properties: int = 1_000
    enum_values: int = 2_000
    enum_bytes: int = 64 << 10
    pattern_bytes: int = 2_048
    branches: int = 250


DEFAULT_LIMITS = Limits()


def check_limits(spec: GrammarSpec, limits: Limits = DEFAULT_LIMITS) -> None:
    """Refuse a grammar that is too large to be worth a compile.

    Raises:
        GrammarError: with the keyword, limit and value.
    """
    json_kind = spec.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG)
    if json_kind:
        _depth(spec, limits)
    most = limits.schema_bytes if json_kind or spec.kind is GrammarKind.CHOICE else limits.grammar_bytes
    if len(spec.content) > most:
        raise size_error(spec, f"makes the whole too large: {len(spec.content)} bytes; the limit is {most}")
    if spec.kind is GrammarKind.CHOICE:
        _check_values(spec.value(), "choice", None, limits)
    if json_kind:
        _Walk(spec, limits).run()


def _depth(spec: GrammarSpec, limits: Limits) -> None:
    content = spec.content
    if content.count(b"{") + content.count(b"[") <= limits.depth:
        return
    brackets = rest = _STRINGS.sub(b"", content).translate(_AS_BRACES, _NO_BRACKETS)
    for _ in range(limits.depth):
        rest = rest.replace(b"{}", b"")  # what is innermost
    deepest = _deepest(brackets) if rest else 0
    if deepest > limits.depth:
        raise depth_error(spec, limits.depth, f"is nested {deepest} deep; the limit is {limits.depth}")


def _deepest(brackets: bytes) -> int:
    return max(accumulate(1 if bracket in b"{" else -1 for bracket in brackets), default=0)


# Where a value stands, as (the place around it, the step to it): a pointer is only wanted for a refusal.
_Place: TypeAlias = "tuple[_Place | None, str | int]"


def _pointer(place: _Place | None) -> str:
    steps: list[str | int] = []
    while place is not None:
        place, step = place
        steps.append(step)
    return pointer_join("", *reversed(steps))


class _Walk:
    def __init__(self, spec: GrammarSpec, limits: Limits) -> None:
        self.spec = spec
        self.limits = limits
        self.objects = 0
        self.value_bytes = 0

    def run(self) -> None:
        root = self.spec.value()
        stack: list[tuple[Any, _Place | None]] = [(root, None)] if isinstance(root, dict | list) else []
        while stack:
            at, place = stack.pop()
            if isinstance(at, dict):
                self.objects += 1
                if self.objects > self.limits.subschemas:
                    reason = f"makes the whole too large: more than {self.limits.subschemas} objects"
                    raise count_error(self.spec, reason)
                if not at.keys().isdisjoint(_COUNTED):
                    self.check(at, place)
                steps: Any = at.items()
            else:
                steps = enumerate(at)
            stack += [(value, (place, step)) for step, value in steps if isinstance(value, _CONTAINERS)]

    def check(self, schema: dict[str, Any], place: _Place | None) -> None:
        for keyword in ("properties", "patternProperties"):
            listed = schema.get(keyword)
            if isinstance(listed, dict) and len(listed) > self.limits.properties:
                self.refuse(keyword, place, f"has {len(listed)} entries; the limit is {self.limits.properties}")
        for keyword in ("anyOf", "oneOf", "allOf"):
            listed = schema.get(keyword)
            if isinstance(listed, list) and len(listed) > self.limits.branches:
                self.refuse(keyword, place, f"has {len(listed)} branches; the limit is {self.limits.branches}")
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and len(pattern.encode()) > self.limits.pattern_bytes:
            size = len(pattern.encode())
            self.refuse("pattern", place, f"has {size} bytes; the limit is {self.limits.pattern_bytes}")
        values = schema.get("enum")
        if isinstance(values, list):
            self.value_bytes = _check_values(values, "enum", place, self.limits, self.value_bytes)

    def refuse(self, keyword: str, place: _Place | None, reason: str) -> None:
        raise GrammarError(keyword, _pointer((place, keyword)), reason)


def _check_values(values: list[Any], keyword: str, place: _Place | None, limits: Limits, before: int = 0) -> int:
    if len(values) > limits.enum_values:
        where = _values_pointer(keyword, place)
        raise GrammarError(keyword, where, f"has {len(values)} values; the limit is {limits.enum_values}")
    total = before + sum(len(str(value)) for value in values)
    if total > limits.enum_bytes:
        where = _values_pointer(keyword, place)
        raise GrammarError(keyword, where, f"values take {total} bytes in all; the limit is {limits.enum_bytes}")
    return total


def _values_pointer(keyword: str, place: _Place | None) -> str:
    return "" if keyword == "choice" else _pointer((place, keyword))
