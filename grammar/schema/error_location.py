"""Error location: which keyword and JSON Pointer to name in an error about a whole grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ..errors import GrammarError
from ..spec import GrammarKind, GrammarSpec
from .document import pointer_join

# Keywords that probably make a schema too complex for a backend, the most probable first.
_SUSPECTS = ("pattern", "patternProperties", "multipleOf", "maxLength", "enum", "oneOf", "anyOf", "allOf", "properties")
_DATA = frozenset(("enum", "const", "default", "examples", "example"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))
_JSON_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG)
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},]')

Path = list[str | int]


def complexity_error(spec: GrammarSpec, reason: str) -> GrammarError:
    """Return a backend's error, located at the keyword that has probably caused it."""
    if spec.kind is not GrammarKind.JSON_SCHEMA or not isinstance(spec.value(), dict):
        return GrammarError(spec.kind.value, "", reason)
    found: dict[str, str] = {}
    stack: list[tuple[Any, str]] = [(spec.value(), "")]
    while stack:
        at, pointer = stack.pop()
        steps = at.items() if isinstance(at, dict) else enumerate(at)
        for step, value in steps:
            where = pointer_join(pointer, step)
            found.setdefault(str(step), where)
            if isinstance(value, dict | list):
                stack.append((value, where))
    keyword = next((name for name in _SUSPECTS if name in found), next(iter(spec.value()), "schema"))
    return GrammarError(keyword, found.get(keyword, ""), reason)


def depth_error(spec: GrammarSpec, limit: int, reason: str) -> GrammarError:
    """Return an error about depth, located at the first part of a grammar in JSON that is more than `limit` deep."""
    return _error(spec, _path_at_depth(spec.content, limit), reason)


def size_error(spec: GrammarSpec, reason: str) -> GrammarError:
    """Return an error about size, located at the smallest part of a grammar with half of its bytes."""
    return _error(spec, _heaviest(spec, len), reason)


def count_error(spec: GrammarSpec, reason: str) -> GrammarError:
    """Return an error about the number of objects, located at the smallest part of a grammar with half of them."""
    return _error(spec, _heaviest(spec, lambda leaf: 0, of_object=1), reason)


def relocated(error: GrammarError, schema: Any) -> GrammarError:
    """Return an error located at a keyword of the schema; synthetic subschemas may have other keywords."""
    if not isinstance(schema, dict) or not schema:
        return error
    path: Path = []
    at = schema
    for token in error.pointer.split("/")[1:]:
        step = token.replace("~1", "/").replace("~0", "~")
        members = _members(at)
        found = int(step) if step not in members and step.isdecimal() else step
        if found not in members:
            break
        path.append(found)
        at = members[found]
    else:
        if path[-1:] == [error.keyword] or error.keyword in _members(at):
            return error
    return _error(GrammarSpec.json_schema(schema), path or [next(iter(schema))], error.reason)


def _members(value: Any) -> dict[Any, Any]:
    if isinstance(value, list):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else {}


def _error(spec: GrammarSpec, path: Path, reason: str) -> GrammarError:
    """Locate an error at the last keyword on a path; property names and keys inside data are not keywords."""
    at = last = 0
    while at < len(path):
        step = path[at]
        if isinstance(step, str):
            last = at
        if step in _DATA:
            break
        at += 2 if step in _NAMED else 1
    if not path:
        return GrammarError(spec.kind.value, "", reason)
    return GrammarError(str(path[last]), pointer_join("", *path[: last + 1]), reason)


def _path_at_depth(content: bytes, limit: int) -> Path:
    """Return the keys and indices that lead to the first array or object at nesting depth `limit`, in valid JSON.

    The text is scanned, not parsed, because it may be nested too deeply for the parser.
    """
    path: Path = []
    expects_key = False
    for match in _TOKENS.finditer(content):
        token = match[0]
        if token in b"[{":
            if len(path) == limit:
                break
            path.append("" if token == b"{" else 0)
            expects_key = token == b"{"
        elif token in b"]}":
            path.pop()
            expects_key = False
        elif token == b",":
            step = path[-1]
            expects_key = isinstance(step, str)
            path[-1] = step if isinstance(step, str) else step + 1
        elif expects_key:
            path[-1] = json.loads(token)
            expects_key = False
    return path


def _heaviest(spec: GrammarSpec, of_text: Callable[[str], int], of_object: int = 2) -> Path:
    """Return the path, of at least one step, to the smallest part that has at least half of the document's weight.

    Args:
        of_text: weight of a key, or of a value that is neither array nor object.
        of_object: weight of an array or object without its members.
    """
    if spec.kind not in _JSON_KINDS:
        return []
    value = spec.value()
    weights: dict[int, int] = {}

    def weigh(at: Any) -> int:
        if id(at) in weights:
            return weights[id(at)]
        if isinstance(at, dict):
            weights[id(at)] = of_object + sum(of_text(key) + weigh(item) for key, item in at.items())
        elif isinstance(at, list):
            weights[id(at)] = of_object + sum(map(weigh, at))
        else:
            return of_text(str(at))
        return weights[id(at)]

    least = weigh(value) / 2
    path: Path = []
    while isinstance(value, dict | list) and value:
        steps = value.items() if isinstance(value, dict) else enumerate(value)
        weight, step, value = max(((weigh(item), step, item) for step, item in steps), key=lambda found: found[0])
        if path and weight < least:
            break
        path.append(step)
    return path
