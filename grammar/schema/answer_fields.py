"""Fields of a JSON answer: the values among which a schema lets a model choose, and the properties that it may omit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .document import Document

Place = tuple[int, ...]
"""The subschemas that may apply to one value, by number; none where nothing is known of it."""

_ALL, _ANY = ("allOf",), ("anyOf", "oneOf")
_CONDITIONAL = ("then", "else")
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


class AnswerFields:
    """Looks up the subschemas for a place in an answer, in a schema that has been compiled and so is well formed.

    A subschema that applies only to some answers (a branch of a union, a condition) is treated as if it applied.
    """

    def __init__(self, schema: Any) -> None:
        self._document = Document(schema) if isinstance(schema, dict) else None
        self._applied: dict[int, Place] = {}

    @property
    def root(self) -> Place:
        """The place of the whole answer."""
        return () if self._document is None else (self._document.root,)

    def properties(self, place: Place) -> Mapping[str, Place]:
        """Return the named properties of an object, in the order of the schema."""
        found: dict[str, Place] = {}
        for number in self._all_applied(place):
            for name, schema in self._schema(number).get("properties", {}).items():
                found[name] = (*found.get(name, ()), *self._children(number, schema, "properties", name))
        return found

    def optional(self, place: Place) -> frozenset[str]:
        """Return the named properties of an object that it may lack."""
        required = [self._required(number, frozenset()) for number in place]
        return frozenset(self.properties(place)).difference(frozenset.intersection(*required) if required else ())

    def item(self, place: Place, index: int) -> Place:
        """Return the place of an item of an array."""
        found: list[int] = []
        for number in self._all_applied(place):
            schema = self._schema(number)
            listed = schema.get("prefixItems", schema.get("items"))
            keyword = "prefixItems" if "prefixItems" in schema else "items"
            rest = "items" if keyword == "prefixItems" else "additionalItems"
            if isinstance(listed, list):
                if index < len(listed):
                    found += self._children(number, listed[index], keyword, index)
                else:
                    found += self._children(number, schema.get(rest), rest)
            else:
                found += self._children(number, listed, "items")
        return tuple(found)

    def has_choices(self, place: Place) -> bool:
        """Return whether some values at a place are chosen: whether ``is_choice`` may be true."""
        return any(map(self._may_choose, self._all_applied(place)))

    def is_choice(self, place: Place, value: Any) -> bool:
        """Return whether a scalar value is one of an enum, of constants, a boolean or null, or of a bounded range."""
        applied = self._all_applied(place)
        limiting = [each for each in applied if not self._schema(each).keys().isdisjoint(("const", "enum", "type"))]
        return any(self._chooses(number, value, is_alone=len(limiting) < 2) for number in applied)

    def _chooses(self, number: int, value: Any, *, is_alone: bool) -> bool:
        schema = self._schema(number)
        if "enum" in schema and any(_same(value, each) for each in schema["enum"]):
            return True
        if not is_alone and "const" in schema and _same(value, schema["const"]):
            return True
        types = _types(schema)
        if value is None:
            return "null" in types and (len(types) > 1 or not is_alone)
        if isinstance(value, bool):
            return "boolean" in types
        return isinstance(value, int) and _is_bounded(schema)

    def _may_choose(self, number: int) -> bool:
        schema = self._schema(number)
        return (
            "enum" in schema or "const" in schema or bool({"boolean", "null"} & _types(schema)) or _is_bounded(schema)
        )

    def _required(self, number: int, above: frozenset[int]) -> frozenset[str]:
        """Return the properties that an object must have whenever a subschema applies to it."""
        if number in above:
            return frozenset()
        schema, above = self._schema(number), above | {number}
        found = frozenset(name for name in schema.get("required", ()) if isinstance(name, str))
        for inner in self._certain(number):
            found |= self._required(inner, above)
        for keyword in _ANY:
            branches = schema.get(keyword)
            if branches:
                each = [self._children(number, branch, keyword, index) for index, branch in enumerate(branches)]
                parts = [self._required(branch[0], above) if branch else frozenset() for branch in each]
                found |= frozenset.intersection(*parts)
        return found

    def _certain(self, number: int) -> Iterator[int]:
        """Yield the subschemas that apply to a value whenever this one does."""
        assert self._document is not None
        schema = self._schema(number)
        if isinstance(schema.get("$ref"), str):
            target = self._document.resolve(number, schema["$ref"])
            if not isinstance(target, bool):
                yield target
        for keyword in _ALL:
            for index, branch in enumerate(schema.get(keyword, ())):
                yield from self._children(number, branch, keyword, index)

    def _possible(self, number: int) -> Iterator[int]:
        """Yield the subschemas that may apply to a value if this one does."""
        schema = self._schema(number)
        for keyword in _ANY:
            for index, branch in enumerate(schema.get(keyword, ())):
                yield from self._children(number, branch, keyword, index)
        for keyword in _CONDITIONAL:
            yield from self._children(number, schema.get(keyword), keyword)
        for name, branch in schema.get("dependentSchemas", {}).items():
            yield from self._children(number, branch, "dependentSchemas", name)

    def _all_applied(self, place: Place) -> Sequence[int]:
        found: dict[int, None] = {}
        for number in place:
            if number not in self._applied:
                self._applied[number] = tuple(self._reach(number))
            found.update(dict.fromkeys(self._applied[number]))
        return list(found)

    def _reach(self, number: int) -> Iterable[int]:
        found, stack = {number: None}, [number]
        while stack:
            at = stack.pop()
            new = [each for each in (*self._certain(at), *self._possible(at)) if each not in found]
            found.update(dict.fromkeys(new))
            stack += reversed(new)
        return found

    def _children(self, number: int, schema: Any, *tokens: str | int) -> Place:
        assert self._document is not None
        return (self._document.child(number, schema, *tokens),) if isinstance(schema, dict) else ()

    def _schema(self, number: int) -> dict[str, Any]:
        assert self._document is not None
        return self._document.nodes[number].schema


def _types(schema: Mapping[str, Any]) -> set[str]:
    types = schema.get("type", ())
    return {types} if isinstance(types, str) else set(types)


def _is_bounded(schema: Mapping[str, Any]) -> bool:
    bounds = all(any(keyword in schema for keyword in keywords) for keywords in (_LOW, _HIGH))
    return bounds and "integer" in _types(schema)


def _same(value: Any, listed: Any) -> bool:
    """Return whether two scalars are equal in JSON, where true differs from 1."""
    return isinstance(value, bool) == isinstance(listed, bool) and bool(value == listed)
