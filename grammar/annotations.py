"""Annotations of JSON Schema (titles, descriptions, examples, unknown keywords), cut off before anything is measured.

By the specification annotations constrain nothing. So they do not count towards any limit, and schemas that differ only
in annotations are compiled to a single grammar.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

# Keywords whose value is a subschema or a list of them, and keywords whose value is an object of subschemas.
SUBSCHEMA = frozenset(
    ("additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "contentSchema", "else", "if", "items",
     "not", "oneOf", "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties")
)  # fmt: skip
SUBSCHEMAS = frozenset(("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"))
# All other keywords that say what is valid, what the schema is called, or of which draft it is.
_EFFECTIVE = frozenset(
    ("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$ref", "$dynamicRef", "$recursiveRef",
     "type", "enum", "const", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
     "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "uniqueItems", "minContains", "maxContains", "required",
     "minProperties", "maxProperties", "dependentRequired")
)  # fmt: skip
EFFECTIVE = SUBSCHEMA | SUBSCHEMAS | _EFFECTIVE
# Keywords whose null is a value, or, as that of `type`, may have been meant for one.
_NULL_IS_MEANT = frozenset(("const", "default", "example", "type"))
_REFERENCES = ("$ref", "$dynamicRef")


def without_annotations(schema: Any) -> Any:
    """Return a schema without its annotations and those of its subschemas. Targets of references are kept.

    Raises:
        RecursionError: the schema is nested too deeply.
    """
    return _cut(schema, _referenced(schema))


def tag_without_annotations(tag: Any) -> Any:
    """Return a structural tag, or a part of one, whose schemas have no annotations."""
    if isinstance(tag, list):
        return [tag_without_annotations(item) for item in tag]
    if not isinstance(tag, dict):
        return tag
    of_schema = "json_schema" if tag.get("type") == "json_schema" else "schema"
    return {
        key: without_annotations(value) if key == of_schema else tag_without_annotations(value)
        for key, value in tag.items()
    }


def without_nulls(schema: Any) -> Any:
    """Return a schema without keywords whose value is null, for templates and other readers of its parts.

    Serialisers of some languages write null for a field without a value, and Go writes it for a nil list or map. Null
    is valid only for keywords whose value is any JSON value (such as ``const``). For all other keywords it means that
    the keyword is absent, as for all fields of a request.

    Raises:
        RecursionError: the schema is nested too deeply.
    """
    return _cut(schema, None)


def _cut(schema: Any, kept: frozenset[str] | None) -> Any:
    """Return a schema without nulls, and without annotations other than those named, or with all of them."""
    if isinstance(schema, list):
        return [_cut(item, kept) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for keyword, value in schema.items():
        if value is None and keyword not in _NULL_IS_MEANT:
            continue
        if keyword in SUBSCHEMA:
            found[keyword] = _cut(value, kept)
        elif keyword in SUBSCHEMAS and isinstance(value, dict):
            # A list of names, in `dependencies`, holds no subschema.
            found[keyword] = {name: _cut(item, kept) for name, item in value.items()}
        elif kept is None or keyword in EFFECTIVE or keyword in kept:
            found[keyword] = value
    return found


def _referenced(schema: Any) -> frozenset[str]:
    """Return the tokens of all JSON Pointers in references, whatever they stand in."""
    found: set[str] = set()
    stack = [schema]
    while stack:
        at = stack.pop()
        if isinstance(at, dict):
            for keyword in _REFERENCES:
                if isinstance(reference := at.get(keyword), str):
                    pointer = unquote(reference.partition("#")[2])
                    found.update(token.replace("~1", "/").replace("~0", "~") for token in pointer.split("/")[1:])
            stack += at.values()
        elif isinstance(at, list):
            stack += at
    return frozenset(found)
