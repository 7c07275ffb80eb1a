"""Eight small schemas of the kinds that applications ask for, and whether an answer follows one."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator


def _text(longest: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": longest}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _list(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


SCHEMAS = (
    _object(title=_text(40), author=_text(30), year={"type": "integer", "minimum": 1400, "maximum": 2100}),
    _object(reference={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{5}$"}, due={"type": "string", "format": "date"}),
    _object(mood={"enum": ["calm", "cross", "glad"]}, strength={"type": "integer", "minimum": 0, "maximum": 9}),
    _object(name=_text(30), mail={"type": "string", "format": "email"}, languages=_list(_text(12), 3)),
    _object(steps=_list(_object(action=_text(40), minutes={"type": "integer"}), 3), done={"type": "boolean"}),
    _object(place=_object(street=_text(30), town=_text(20)), note={"anyOf": [_text(40), {"type": "null"}]}),
    _object(answer={"type": "number"}, unit={"enum": ["m", "kg", "s"]}, reasoning=_text(80)),
    _object(parts=_list(_object(id={"type": "integer"}, kind={"enum": ["bolt", "nut", "washer"]}), 3)),
)


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON that follows a schema, its formats included."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return bool(Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).is_valid(value))
