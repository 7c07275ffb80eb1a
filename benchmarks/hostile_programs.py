"""Programs of clients and publishers whose work doubles with their length: schemas and chat templates."""

from __future__ import annotations

from typing import Any

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
"""A chat template that does not end."""


def doubling(keyword: str, levels: int) -> dict[str, Any]:
    """Return a schema that names itself twice at each level."""
    definitions: dict[str, Any] = {"a0": {"type": "string", "maxLength": 3}}
    for level in range(1, levels + 1):
        definitions[f"a{level}"] = {keyword: [{"$ref": f"#/$defs/a{level - 1}"}] * 2}
    return {"$ref": f"#/$defs/a{levels}", "$defs": definitions}


def unevaluated(levels: int) -> dict[str, Any]:
    """Return a schema whose validator looks at each level twice for what was evaluated."""
    definitions: dict[str, Any] = {"a0": {"properties": {"a": {"type": "string"}}}}
    for level in range(1, levels + 1):
        below = {"$ref": f"#/$defs/a{level - 1}"}
        definitions[f"a{level}"] = {"dependentSchemas": {"a": below, "b": below}}
    return {"$ref": f"#/$defs/a{levels}", "unevaluatedProperties": False, "$defs": definitions}
