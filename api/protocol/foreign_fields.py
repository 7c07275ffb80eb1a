"""Fields of other servers and of clients, as data: each is mapped, accepted without effect, or refused.

The table is ``foreign_fields.toml``; its first lines explain its form. Request models and a section of
``docs/reference/api.md`` are generated from it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .base import Refusal


@dataclass(frozen=True, slots=True)
class ForeignField:
    """A field that does not belong to the protocols of the routes.

    Attributes:
        by: server or client to which the field belongs.
        inert: why the field changes no answer; empty if it may change one.
        refuse: for a refused field, what the client can do instead; empty if the field is accepted.
        same: values of a refused field that have no effect, and are accepted.
        mapped: for an accepted field, its effect. Such a field is a field of the request model too.
    """

    name: str
    by: str
    inert: str = ""
    refuse: str = ""
    same: tuple[Any, ...] = ()
    mapped: str = ""


class FieldRules(NamedTuple):
    """The ignored and refused fields, in the form of the class attributes of ``StrictModel``."""

    ignored: frozenset[str]
    refused: Mapping[str, Refusal]


@cache
def foreign_table() -> Mapping[str, tuple[ForeignField, ...]]:
    """Return the fields by their place in a request."""
    text = Path(__file__).with_suffix(".toml").read_text("utf-8")
    return {
        place: tuple(
            ForeignField(name, **{**entry, "same": tuple(entry.get("same", ()))}) for name, entry in rows.items()
        )
        for place, rows in tomllib.loads(text).items()
    }


def foreign_rules(*places: str) -> FieldRules:
    """Return the ignored and refused fields of these places in a request."""
    rows = [row for place in places for row in foreign_table()[place]]
    return FieldRules(
        frozenset(row.name for row in rows if row.inert),
        {row.name: Refusal(row.refuse, row.same) for row in rows if row.refuse},
    )
