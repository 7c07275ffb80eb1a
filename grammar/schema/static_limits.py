"""Static limits of a grammar (bytes, depth, properties, enum values), checked in one pass before any compile."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

from ..errors import GrammarError
from ..spec import GrammarKind, GrammarSpec
from .document import pointer_join
from .error_location import count_error, depth_error, size_error
from .literal_unions import merged

_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_AS_BRACES = bytes.maketrans(b"[]", b"{}")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_CONTAINERS = (dict, list)
_COUNTED = ("properties", "patternProperties", "anyOf", "oneOf", "allOf", "pattern", "enum")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the size of a grammar.

    Attributes:
        schema_bytes: canonical bytes of a schema or structural tag.
        grammar_bytes: bytes of a regex, EBNF or Lark text.
        depth: nesting of arrays and objects.
        subschemas: objects in a schema.
        properties: properties of one object.
        enum_values: values of one ``enum``, and choices.
        enum_bytes: bytes of all ``enum`` values and literals of unions together, and of all choices.
        pattern_bytes: bytes of one pattern.
        branches: schemas in one ``anyOf``, ``oneOf`` or ``allOf``; literals in one union count as values of one enum.
    """

    schema_bytes: int = 512 << 10
    grammar_bytes: int = 64 << 10
    depth: int = 64
    subschemas: int = 10_000
    properties: int = 1_000
    enum_values: int = 10_000
    enum_bytes: int = 256 << 10
    pattern_bytes: int = 2_048
    branches: int = 256


DEFAULT_LIMITS = Limits()


def check_limits(spec: GrammarSpec, limits: Limits = DEFAULT_LIMITS) -> None:
    """Check a grammar against limits.

    Raises:
        GrammarError: a limit is exceeded; the error names the keyword, the limit and the value.
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
        rest = rest.replace(b"{}", b"")  # the innermost ones
    deepest = _deepest(brackets) if rest else 0
    if deepest > limits.depth:
        raise depth_error(spec, limits.depth, f"is nested {deepest} deep; the limit is {limits.depth}")


def _deepest(brackets: bytes) -> int:
    return max(accumulate(1 if bracket in b"{" else -1 for bracket in brackets), default=0)


# Path of a value as (path of its parent, last token): only an error needs the pointer.
_Path: TypeAlias = "tuple[_Path | None, str | int]"


def _pointer(path: _Path | None) -> str:
    tokens: list[str | int] = []
    while path is not None:
        path, token = path
        tokens.append(token)
    return pointer_join("", *reversed(tokens))


class _Walk:
    """Traversal of a grammar in JSON with an explicit stack, counting objects and values of enumerations."""

    def __init__(self, spec: GrammarSpec, limits: Limits) -> None:
        self.spec = spec
        self.limits = limits
        self.objects = 0
        self.value_bytes = 0
        self.unions: dict[int, list[tuple[int, Any]]] = {}

    def run(self) -> None:
        root = self.spec.value()
        stack: list[tuple[Any, _Path | None]] = [(root, None)] if isinstance(root, dict | list) else []
        while stack:
            parent, path = stack.pop()
            if isinstance(parent, dict):
                self.objects += 1
                if self.objects > self.limits.subschemas:
                    reason = f"makes the whole too large: more than {self.limits.subschemas} objects"
                    raise count_error(self.spec, reason)
                if not parent.keys().isdisjoint(_COUNTED):
                    self.check(parent, path)
                members: Any = parent.items()
            else:
                members = enumerate(parent) if id(parent) not in self.unions else self.unions.pop(id(parent))
            stack += [(value, (path, token)) for token, value in members if isinstance(value, _CONTAINERS)]

    def check(self, schema: dict[str, Any], path: _Path | None) -> None:
        for keyword in ("properties", "patternProperties"):
            if isinstance(listed := schema.get(keyword), dict):
                self.check_size(keyword, path, "entries", len(listed), self.limits.properties)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(listed := schema.get(keyword), list):
                self.check_branches(keyword, listed, path)
        if isinstance(pattern := schema.get("pattern"), str):
            self.check_size("pattern", path, "bytes", len(pattern.encode()), self.limits.pattern_bytes)
        values = schema.get("enum")
        if isinstance(values, list):
            self.value_bytes = _check_values(values, "enum", path, self.limits, self.value_bytes)

    def check_branches(self, keyword: str, listed: list[Any], path: _Path | None) -> None:
        """Check the branches of a union: those that are literals together as the values of one ``enum``."""
        others, literals = merged(listed)
        if keyword != "allOf" and len(literals) > 1:
            self.unions[id(listed)] = others
            values = [value for each in literals for value in each]
            self.value_bytes = _check_values(values, keyword, path, self.limits, self.value_bytes)
        else:
            others = list(enumerate(listed))
        self.check_size(keyword, path, "branches", len(others), self.limits.branches)

    def check_size(self, keyword: str, path: _Path | None, unit: str, size: int, limit: int) -> None:
        if size > limit:
            raise GrammarError(keyword, _pointer((path, keyword)), f"has {size} {unit}; the limit is {limit}")


def _check_values(values: list[Any], keyword: str, path: _Path | None, limits: Limits, before: int = 0) -> int:
    total = before + sum(len(str(value)) for value in values)
    reason = ""
    if len(values) > limits.enum_values:
        reason = f"has {len(values)} values; the limit is {limits.enum_values}"
    elif total > limits.enum_bytes:
        reason = f"values take {total} bytes in all; the limit is {limits.enum_bytes}"
    if reason:
        raise GrammarError(keyword, "" if keyword == "choice" else _pointer((path, keyword)), reason)
    return total
