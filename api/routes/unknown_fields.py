"""Unknown fields: removes unknown fields from requests, and names them and other ignored parts in ASCII."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...engine.errors import shortened

IGNORED_HEADER = "x-ignored-fields"
LEFT_OUT_HEADER = "x-rootgraft-left-out"
_MOST_NAMED = 8
_LONGEST = 64
_ODD_PART = re.compile(r"[^A-Za-z0-9_.\[\] -]")
_ODD = re.compile(r"[^A-Za-z0-9_.\[\]-]")

FieldPath = Sequence[str | int]


def drop_field(body: Any, path: FieldPath) -> bool:
    """Remove the field of a pydantic error from a body. Returns whether it existed. Parts in ``<>`` are skipped."""
    *above, name = path
    for part in above:
        if isinstance(part, str) and part.startswith("<") and not (isinstance(body, dict) and part in body):
            continue
        try:
            body = body[part]
        except (LookupError, TypeError):
            return False
    if not isinstance(body, dict) or name not in body:
        return False
    del body[name]
    return True


class IgnoredFields:
    """Names of removed fields for a header and the log: the first 8, and the number of further ones."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._count)

    def __str__(self) -> str:
        more = self._count - len(self._names)
        return ", ".join(self._names) + (f" and {more} more" if more else "")

    def add(self, paths: Sequence[FieldPath]) -> None:
        """Count removed fields, and keep the names of the first ones."""
        self._count += len(paths)
        self._names += map(_name, paths[: _MOST_NAMED - len(self._names)])


def named(parts: Sequence[str]) -> str:
    """Return the names of parts that were left out, with the same limit as for removed fields."""
    more = len(parts) - _MOST_NAMED
    shown = ", ".join(shortened(_ODD_PART.sub("?", part), _LONGEST) for part in parts[:_MOST_NAMED])
    return shown + (f" and {more} more" if more > 0 else "")


def _name(path: FieldPath) -> str:
    """Return a name like ``messages[0].x``. Other characters become '?'. The middle of a long name is left out."""
    *above, last = path
    parts = [part for part in above if isinstance(part, int) or not part.startswith("<")]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in (*parts, last))
    return shortened(_ODD.sub("?", text.removeprefix(".")), _LONGEST)
