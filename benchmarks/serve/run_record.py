"""Record of a measurement that may be broken off: one line of JSON for each thing measured, appended at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


class RecordMismatch(Exception):
    """A record was made with other settings than those it is to be continued with."""


class RunRecord:
    """Lines of a file, the first of which holds the settings. A record that exists is continued.

    Args:
        settings: of a new record, as JSON knows them.
        same: names of those that must be the same in one that is continued.

    Attributes:
        settings: those of the first line.

    Raises:
        RecordMismatch: the file was begun with other settings, or is not a record.
    """

    def __init__(self, path: Path, settings: Figures, same: Iterable[str]) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        try:
            begun, *self._entries = [json.loads(line) for line in lines] or [settings]
        except ValueError as error:
            raise RecordMismatch(f"{path} is no record of runs: {error}.") from error
        self.settings: Figures = begun
        other = sorted(key for key in same if begun.get(key) != settings[key])
        if other:
            found = ", ".join(f"{key} {begun.get(key)} and not {settings[key]}" for key in other)
            raise RecordMismatch(f"{path} was begun with {found}: name another --output, or remove it to begin anew.")
        if not lines:
            self._append(settings)

    def add(self, **entry: Any) -> None:
        """Append an entry."""
        self._entries.append(entry)
        self._append(entry)

    def entries(self, kind: str, **fields: Any) -> Iterator[Figures]:
        """Yield the entries that have a field ``kind``, and these fields with these values."""
        wanted = fields.items()
        return (each for each in self._entries if kind in each and wanted <= _plain(each).items())

    def _append(self, entry: Figures) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _plain(entry: Figures) -> Figures:
    return {key: value for key, value in entry.items() if isinstance(value, str | int | float)}
