# ruff: noqa: E501 (a paragraph of the page)
"""Writes the section of ``docs/reference/api.md`` on fields of other servers and of clients, from the table that requests use.

python tests/support/foreign_fields_page.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from rootgraft.api.protocol.foreign_fields import ForeignField, foreign_table

PLACES = {
    "generation": "in chats and completions",
    "chat": "in chats",
    "completions": "in completions",
    "responses": "in responses",
    "message": "in a message of a chat",
    "part": "in a text part of a message",
    "tool_call": "in a tool call of a message",
    "tool": "in a tool",
}
_INTRODUCTION = """
Fields that other servers know and popular clients send. **Mapped**: it does what the last column says. **Without effect**: any value is taken. **Refused**: a 400 that says the same as here; a value that asks for nothing is taken. Where each was read stands in `api/protocol/foreign_fields.toml`, from which the server and this section are made (`tests/support/foreign_fields_page.py`).
"""


def section() -> str:
    """The section, without its heading."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    for place, rows in foreign_table().items():
        yield f"| {PLACES[place]} | sent by | | |"
        yield "|---|---|---|---|"
        grouped: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            grouped.setdefault((row.by, *_told(row)), []).append(f"`{row.name}`")
        for (by, kind, text), names in grouped.items():
            yield f"| {', '.join(names)} | {by} | {kind} | {text} |"
        yield ""


def _told(row: ForeignField) -> tuple[str, str]:
    """What becomes of a field, in a word and in a sentence without its full stop."""
    if row.mapped:
        return "mapped", row.mapped
    text = re.sub(r"(?<!\w)'([^']+)'", r"`\1`", (row.inert or row.refuse).removesuffix("."))
    values = " and ".join(f"`{json.dumps(value)}`" for value in row.same if not isinstance(value, float))
    taken = f"; {values} {'are' if ' and ' in values else 'is'} taken" if values else ""
    return ("without effect" if row.inert else "refused"), text + taken


if __name__ == "__main__":
    print(section())
