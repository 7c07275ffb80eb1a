"""Forms from what a program passes to ``gen``, and values from the texts that follow them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from .branch_calls import Form, FormKind


def form_of(schema: Any, regex: str | None, choices: Sequence[str] | None) -> Form | None:
    """The one form that was given, None for free text. Raises ValueError for two.

    Args:
        schema: a JSON Schema as a mapping, or any type that pydantic knows: a model, a dataclass, ``list[int]``.
    """
    given = {
        FormKind.SCHEMA: None if schema is None else _json_schema(schema),
        FormKind.REGEX: regex,
        FormKind.CHOICES: None if choices is None else list(choices),
    }
    forms = [Form(kind, value) for kind, value in given.items() if value is not None]
    if len(forms) > 1:
        raise ValueError(f"{forms[0].kind} and {forms[1].kind} contradict each other: give one")
    return forms[0] if forms else None


def _json_schema(schema: Any) -> Any:
    return dict(schema) if isinstance(schema, Mapping) else TypeAdapter(schema).json_schema()


def value_of(text: str, schema: Any) -> Any:
    """The answer as an instance of the type, as parsed JSON for a schema, else as it is. Raises ValueError."""
    if schema is None:
        return text
    return json.loads(text) if isinstance(schema, Mapping) else TypeAdapter(schema).validate_json(text)
