"""Foreign fields: fields of other servers and clients, as data. Each is mapped, accepted without effect, or refused.

The table is ``foreign_fields.toml``; its first lines explain its format. Request models and a section of
``docs/reference/api.md`` are generated from the table.
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
        inert: reason for which the field never changes the answer; "" if it may change the answer.
        refuse: for a refused field, the advice for the client; "" if the field is accepted.
        same: values of a refused field that have no effect and are therefore accepted.
        mapped: for an accepted field, its effect. The request model has a field of this name too.
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
    """Return the fields of the table, by the place in a request at which they may occur."""
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
