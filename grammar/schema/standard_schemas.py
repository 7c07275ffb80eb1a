"""Meta-schemas of the JSON Schema standard, which references may lead to though they are outside of a schema."""

from __future__ import annotations

from functools import cache
from typing import Any

_HOSTS = ("http://json-schema.org/", "https://json-schema.org/")


def standard_schema(uri: str) -> dict[str, Any] | None:
    """Return the meta-schema, or vocabulary of one, of a URI without fragment; None for any other URI."""
    return _schemas().get(uri) if uri.startswith(_HOSTS) else None


@cache
def _schemas() -> dict[str, dict[str, Any]]:
    from jsonschema_specifications import REGISTRY  # reads twenty files, and few schemas refer to one

    return {uri: REGISTRY.contents(uri) for uri in REGISTRY}
