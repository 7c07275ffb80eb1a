"""Random schemas that mix the keywords of one type with combining keywords and references, and instances near them.

Unlike ``random_schemas``, whose keywords are of any type, the parts of one schema constrain the same values: keys,
texts and numbers come from small sets, so that constraints meet. Everything follows from a ``random.Random``, so that a
seed names a case, and `reduced` cuts a case down.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

Schema: TypeAlias = "dict[str, Any] | bool"
KEYS = ("a", "b", "ab", "x")
OTHER_KEYS = ("", "ba", "xx", "c", "é", '"')
WORDS = ("", "a", "b", "ab", "ba", "aa", "abc", "x", "é", '"', "\n", "a b", "1", "K", "k", "\u212a", "ſ", "s")
PATTERNS = (
    "^a", "b$", "^[ab]*$", "^a|b$", "a", "^(a|b){1,2}$", "^(?!a)", "^(?=.*b)", "^$", "^.$", r"^\w+$", r"\d", r"[^\s]",
    "^[^a]*$", "^(?!ab$)[a-c]*$", "^a?b?$", r"^\S+$", "(^x|b)$", "^é?$", "^x",
)  # fmt: skip
FORMATS = ("date", "time", "date-time", "ipv4", "uuid", "email", "hostname", "duration", "uri", "json-pointer", "regex")
FORMATTED = (
    "2024-02-29", "2023-02-29", "12:30:00Z", "2024-02-29T12:30:00Z", "1.2.3.4", "1.2.3.256", "a@b.cd", "a.b-c", "P1D",
    "00000000-0000-4000-8000-000000000000", "http://a/b", "/a/b", "a(b)*", "a(b",
)  # fmt: skip
BOUNDS = (
    -2, -1, 0, 1, 2, 3, 10, 0.5, -0.5, 1.5, 0.1, 0.3, 2.5, 1e-7, 99, 100, 2**53, 2**53 + 1, float(2**53), 1e16, 1e23,
    9.223372036854776e18, -1e20, 4.35, 1e300, 123456789.125, 0.1 + 0.2,
)  # fmt: skip
STEPS = (1, 2, 3, 5, 7, 10, 0.5, 0.1, 0.01, 0.25, 1.5, 0.3)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
DRAFTS = {
    4: "http://json-schema.org/draft-04/schema#",
    6: "http://json-schema.org/draft-06/schema#",
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}
COMBINING = ("allOf", "anyOf", "oneOf", "not", "if")


class SchemaDraw:
    """Draws one schema: its definitions are referred to from anywhere in it.

    Args:
        rng: source of all choices.
        draft: draft of the schema.
    """

    def __init__(self, rng: random.Random, draft: int = 2020) -> None:
        self._rng = rng
        self._draft = draft
        self._definitions = rng.choice((0, 0, 1, 2))
        self._parts: dict[str, Callable[[int], dict[str, Any]]] = {
            "string": self._string,
            "number": self._number,
            "array": self._array,
            "object": self._object,
        }

    def schema(self) -> dict[str, Any]:
        """Return a whole schema."""
        rng = self._rng
        found: dict[str, Any] = {}
        if self._draft != 2020 or rng.random() < 0.1:
            found["$schema"] = DRAFTS[self._draft]
        kind = rng.choice(("string", "number", "array", "object", "object", "array", "any"))
        found |= self._one(kind, 3)
        if self._definitions:
            word = "$defs" if self._draft >= 2019 else "definitions"
            found[word] = {f"d{index}": self._one(rng.choice((kind, "any")), 2) for index in range(self._definitions)}
        return found

    def part(self, kind: str, depth: int) -> Schema:
        """Return a subschema for values of a kind, which may be a boolean."""
        rng = self._rng
        if rng.random() < 0.06 and self._draft > 4:
            return rng.random() < 0.7
        if depth <= 0:
            return self._leaf(kind)
        return self._one(kind, depth)

    def _inner(self, kind: str, depth: int) -> Schema:
        """Return a subschema for an item or a property, which alone may refer to the schemas around it."""
        rng = self._rng
        if rng.random() > 0.12:
            return self.part(kind, depth)
        word = "$defs" if self._draft >= 2019 else "definitions"
        return {"$ref": rng.choice(("#", *(f"#/{word}/d{index}" for index in range(self._definitions))))}

    def _leaf(self, kind: str) -> dict[str, Any]:
        rng = self._rng
        choice = rng.randrange(5)
        if choice == 0 and self._draft > 4:
            return {"const": self._value(kind)}
        if choice == 1:
            return {"enum": [self._value(kind) for _ in range(rng.randint(1, 3))]}
        if choice == 2:
            return {}
        return {"type": self._type(kind)}

    def _type(self, kind: str) -> Any:
        rng = self._rng
        names = {"number": ("integer", "number"), "any": TYPES}
        name = rng.choice(names.get(kind, (kind,)))
        return name if rng.random() < 0.8 else list(dict.fromkeys((name, rng.choice(TYPES))))

    def _one(self, kind: str, depth: int) -> dict[str, Any]:
        rng = self._rng
        if kind == "any":
            kind = rng.choice(("string", "number", "array", "object"))
        found: dict[str, Any] = {}
        if rng.random() < 0.6:
            found["type"] = self._type(kind)
        if rng.random() < 0.85:
            found |= self._parts[kind](depth)
        if rng.random() < 0.12:
            found |= self._leaf(kind)
        for _ in range(rng.choice((0, 0, 1, 1, 2)) if depth > 0 else 0):
            found |= self._combined(kind, depth - 1)
        items = list(found.items())
        rng.shuffle(items)
        return dict(items)

    def _combined(self, kind: str, depth: int) -> dict[str, Any]:
        rng = self._rng
        keyword = rng.choice(COMBINING)
        if keyword == "not":
            return {"not": self.part(kind, min(depth, 1))}
        if keyword == "if":
            found = {"if": self.part(kind, min(depth, 1))}
            for outcome in ("then", "else"):
                if rng.random() < 0.6:
                    found[outcome] = self.part(kind, depth)
            return found
        other = rng.choice(TYPES) if rng.random() < 0.2 else kind
        kinds = [kind, other if other in self._parts else "any"]
        return {keyword: [self.part(rng.choice(kinds), depth) for _ in range(rng.randint(1, 3))]}

    def _chosen(self, known: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        names = self._rng.sample(sorted(known), min(len(known), self._rng.choice((1, 1, 2, 2, 3, 4))))
        return {name: known[name]() for name in names}

    def _string(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        return self._chosen(
            {
                "minLength": lambda: rng.choice((0, 1, 2, 3)),
                "maxLength": lambda: rng.choice((0, 1, 2, 3, 20)),
                "pattern": lambda: rng.choice(PATTERNS),
                "format": lambda: rng.choice(FORMATS),
            }
        )

    def _number(self, depth: int) -> dict[str, Any]:
        rng = self._rng

        def bound() -> Any:
            return rng.choice(BOUNDS)

        def exclusive() -> Any:
            return True if self._draft == 4 else bound()

        found = self._chosen(
            {
                "minimum": bound,
                "maximum": bound,
                "exclusiveMinimum": exclusive,
                "exclusiveMaximum": exclusive,
                "multipleOf": lambda: rng.choice(STEPS),
            }
        )
        if self._draft == 4:
            for keyword in ("Minimum", "Maximum"):
                if f"exclusive{keyword}" in found:
                    found.setdefault(keyword.lower(), bound())
        return found

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        inner = rng.choice(("any", "string", "number", "object"))

        def part() -> Schema:
            return self._inner(inner, depth - 1)

        known: dict[str, Callable[[], Any]] = {
            "items": part,
            "minItems": lambda: rng.choice((0, 1, 2, 3)),
            "maxItems": lambda: rng.choice((0, 1, 2, 3)),
            "uniqueItems": lambda: rng.random() < 0.8,
        }
        if self._draft >= 6:
            known["contains"] = part
        if self._draft >= 2019:
            known |= {
                "minContains": lambda: rng.choice((0, 1, 2)),
                "maxContains": lambda: rng.choice((0, 1, 2)),
                "unevaluatedItems": part,
            }
        listed = [part() for _ in range(rng.randint(1, 2))]
        if self._draft >= 2020:
            known["prefixItems"] = lambda: listed
        elif rng.random() < 0.4:
            known |= {"items": lambda: listed, "additionalItems": part}
        return self._chosen(known)

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        inner = rng.choice(("any", "string", "number"))

        def part() -> Schema:
            return self._inner(inner, depth - 1)

        def keys(most: int) -> list[str]:
            return rng.sample(KEYS, rng.randint(1, most))

        known: dict[str, Callable[[], Any]] = {
            "properties": lambda: {key: part() for key in keys(3)},
            "required": lambda: keys(2),
            "additionalProperties": lambda: part() if rng.random() < 0.6 or self._draft <= 4 else False,
            "patternProperties": lambda: {rng.choice(PATTERNS): part() for _ in range(rng.randint(1, 2))},
            "minProperties": lambda: rng.choice((0, 1, 2, 3)),
            "maxProperties": lambda: rng.choice((0, 1, 2, 3)),
        }
        if self._draft >= 6:
            known["propertyNames"] = lambda: self.part("string", depth - 1)
        if self._draft >= 2019:
            known |= {
                "dependentRequired": lambda: {key: keys(2) for key in keys(2)},
                "dependentSchemas": lambda: {key: self.part("object", depth - 1) for key in keys(2)},
                "unevaluatedProperties": part,
            }
        else:
            known["dependencies"] = lambda: {
                key: keys(2) if rng.random() < 0.5 else self.part("object", depth - 1) for key in keys(2)
            }
        return self._chosen(known)

    def _value(self, kind: str) -> Any:
        return random_value(self._rng, kind)


def random_value(rng: random.Random, kind: str = "any", depth: int = 2) -> Any:
    """Return a random instance of a kind: string, number, array, object or any."""
    if kind == "any":
        kind = rng.choice(("string", "string", "number", "number", "constant", "array", "object") if depth else SCALAR)
    if kind == "string":
        return rng.choice(WORDS if rng.random() < 0.85 else FORMATTED)
    if kind == "number":
        return near(rng, rng.choice(BOUNDS)) if rng.random() < 0.5 else rng.choice((0, 1, 2, 3, -1, 0.5, 1.5))
    if kind == "array":
        return [random_value(rng, depth=depth - 1) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))]
    if kind == "object":
        names = rng.sample((*KEYS, *OTHER_KEYS), rng.choice((0, 1, 1, 2, 2, 3)))
        return {name: random_value(rng, depth=depth - 1) for name in names}
    return rng.choice((None, True, False))


SCALAR = ("string", "number", "constant")


def near(rng: random.Random, value: float) -> float:
    """Return a number at, or just beside, a given one."""
    choice = rng.randrange(6)
    if choice == 0:
        return value + rng.choice((-1, 1))
    if choice == 1:
        return math.nextafter(value, rng.choice((-math.inf, math.inf)))
    if choice == 2 and abs(value) < 1e17:
        return int(value) + rng.choice((-1, 0, 1))
    return value


class Instances:
    """Draws instances that a schema may hold for: it follows keywords, references and literals, and strays at times.

    Args:
        schema: the whole schema.
        rng: source of all choices.
    """

    def __init__(self, schema: dict[str, Any], rng: random.Random) -> None:
        self._root, self._rng = schema, rng
        self._literals = list(_literals(schema))
        self._numbers = list(_numbers(schema)) or [0, 1]
        self._keys = list(dict.fromkeys((*_keys(schema), *KEYS[:2])))
        self._texts = [each for each in self._literals if isinstance(each, str)] + list(WORDS)

    def draw(self, schema: Any = None, depth: int = 4) -> Any:
        """Return an instance of a subschema, by default of the whole."""
        rng = self._rng
        schema = self._root if schema is None else schema
        if not isinstance(schema, dict) or depth <= 0 or rng.random() < 0.06:
            return self._anything(depth)
        parts = self._merged(schema, 3)
        listed = [
            value for part in parts for value in (*part.get("enum", ()), *((part["const"],) if "const" in part else ()))
        ]
        if listed and rng.random() < 0.8:
            return rng.choice(listed)
        names = [name for part in parts for name in _types(part)]
        if not names:
            names = [kind for part in parts for kind in _implied(part)]
        kind = rng.choice(names) if names and rng.random() < 0.9 else rng.choice(TYPES)
        return self._of(kind, parts, depth)

    def _of(self, kind: str, parts: list[dict[str, Any]], depth: int) -> Any:
        rng = self._rng
        if kind == "null":
            return None
        if kind == "boolean":
            return rng.random() < 0.5
        if kind in ("integer", "number"):
            bounds = [part[each] for part in parts for each in NUMERIC if _is_number(part.get(each))]
            value = near(rng, rng.choice(bounds or self._numbers))
            steps = [part["multipleOf"] for part in parts if _is_number(part.get("multipleOf"))]
            if steps and rng.random() < 0.7:
                step = rng.choice(steps)
                value = step * round(min(max(value, -1e9), 1e9) / step + rng.choice((0, 0, 1, -1)))
            return int(value) if kind == "integer" and abs(value) < 1e200 else value
        if kind == "string":
            return self._text(parts)
        return self._array(parts, depth) if kind == "array" else self._object(parts, depth)

    def _text(self, parts: list[dict[str, Any]]) -> str:
        rng = self._rng
        if any("format" in part for part in parts) and rng.random() < 0.7:
            return rng.choice(FORMATTED)
        text = rng.choice(self._texts)
        if rng.random() < 0.3:
            text += rng.choice(self._texts)
        return text

    def _array(self, parts: list[dict[str, Any]], depth: int) -> list[Any]:
        rng = self._rng
        sizes = [part[each] for part in parts for each in ("minItems", "maxItems") if _is_number(part.get(each))]
        size = rng.choice([*sizes, *sizes, 0, 1, 2]) if rng.random() < 0.9 else rng.randrange(4)
        found = []
        for index in range(min(4, size)):
            options: list[Any] = []
            for part in parts:
                listed = part.get("prefixItems", part.get("items"))
                if isinstance(listed, list):
                    options.append(
                        listed[index]
                        if index < len(listed)
                        else part.get("items" if "prefixItems" in part else "additionalItems", True)
                    )
                options += [
                    part[each] for each in ("items", "contains", "unevaluatedItems") if isinstance(part.get(each), dict)
                ]
            found.append(self.draw(rng.choice(options), depth - 1) if options else self._anything(depth - 1))
        return found

    def _object(self, parts: list[dict[str, Any]], depth: int) -> dict[str, Any]:
        rng = self._rng
        names = dict.fromkeys(name for part in parts for name in part.get("required", ()) if rng.random() < 0.93)
        declared = [name for part in parts for name in part.get("properties", {})]
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            names[rng.choice([*declared, *declared, *self._keys, *OTHER_KEYS])] = None
        chosen = list(names)
        if rng.random() < 0.2:
            rng.shuffle(chosen)
        found = {}
        for name in chosen:
            options = [part["properties"][name] for part in parts if name in part.get("properties", {})]
            options += [value for part in parts for value in part.get("patternProperties", {}).values() if not options]
            if not options:
                extra = ("additionalProperties", "unevaluatedProperties")
                options = [part[each] for part in parts for each in extra if isinstance(part.get(each), dict)]
            found[name] = self.draw(rng.choice(options), depth - 1) if options else self._anything(depth - 1)
        return found

    def _merged(self, schema: dict[str, Any], depth: int) -> list[dict[str, Any]]:
        """Return the schema with the subschemas of its combining keywords that this instance is to hold for."""
        rng = self._rng
        found = [schema]
        if depth == 0:
            return found
        inner: list[Any] = [*schema.get("allOf", ())]
        inner += [rng.choice(schema[each]) for each in ("anyOf", "oneOf") if schema.get(each)]
        inner += [schema[each] for each in ("if", "then", "else", "not") if each in schema and rng.random() < 0.5]
        inner += [part for part in schema.get("dependentSchemas", {}).values() if rng.random() < 0.5]
        if isinstance(schema.get("$ref"), str):
            inner.append(self._target(schema["$ref"]))
        for part in inner:
            if isinstance(part, dict):
                found += self._merged(part, depth - 1)
        return found

    def _target(self, reference: str) -> Any:
        at: Any = self._root
        for token in reference.split("/")[1:]:
            at = at[token]
        return at

    def _anything(self, depth: int) -> Any:
        rng = self._rng
        if self._literals and rng.random() < 0.3:
            return rng.choice(self._literals)
        return random_value(rng, depth=max(0, min(1, depth)))


NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_STRING = ("pattern", "format", "minLength", "maxLength")
_ARRAY = ("items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems", "unevaluatedItems")
_OBJECT = (
    "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
)  # fmt: skip


def _implied(part: dict[str, Any]) -> Iterator[str]:
    for kind, keywords in (
        ("string", _STRING),
        ("array", _ARRAY),
        ("object", _OBJECT),
        ("number", (*NUMERIC, "multipleOf")),
    ):
        if not part.keys().isdisjoint(keywords):
            yield kind


def _types(part: dict[str, Any]) -> list[str]:
    named = part.get("type", [])
    return [named] if isinstance(named, str) else list(named)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _subvalues(value: Any) -> Iterator[Any]:
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _subvalues(item)


def _literals(schema: Any) -> Iterator[Any]:
    for part in _subvalues(schema):
        if isinstance(part, dict):
            yield from part.get("enum", ()) if isinstance(part.get("enum"), list) else ()
            if "const" in part:
                yield part["const"]


def _numbers(schema: Any) -> Iterator[float]:
    yield from (part for part in _subvalues(schema) if _is_number(part))


def _keys(schema: Any) -> Iterator[str]:
    for part in _subvalues(schema):
        if isinstance(part, dict):
            for each in ("properties", "dependentRequired", "dependentSchemas", "dependencies"):
                if isinstance(part.get(each), dict):
                    yield from part[each]
            if isinstance(part.get("required"), list):
                yield from (name for name in part["required"] if isinstance(name, str))


def smaller(value: Any) -> Iterator[Any]:
    """Yield values that have one part less than a given one, or a part in place of the whole."""
    if isinstance(value, dict):
        for key in value:
            yield {name: each for name, each in value.items() if name != key}
        for key, each in value.items():
            for less in smaller(each):
                yield {**value, key: less}
            if isinstance(each, dict) and each.keys() - value.keys():
                yield each
    elif isinstance(value, list):
        for index in range(len(value)):
            yield value[:index] + value[index + 1 :]
        for index, each in enumerate(value):
            for less in smaller(each):
                yield [*value[:index], less, *value[index + 1 :]]


def reduced(value: Any, fails: Callable[[Any], bool], most: int = 400) -> Any:
    """Return a smaller value that still fails, cut down part by part with at most so many trials."""
    left = most
    while True:
        for less in smaller(value):
            left -= 1
            if left < 0:
                return value
            if fails(less):
                value = less
                break
        else:
            return value
