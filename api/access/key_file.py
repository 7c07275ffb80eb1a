"""Key file changes: adds, revokes and rotates keys. Other content of a TOML file is kept. Each change is atomic."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import tomlkit

from ...engine.errors import ConfigError
from ...engine.whole_file import write_whole
from .api_keys import check_entries, new_secret, read_entries

Entries = Any
"""The list of entries: dictionaries for JSON, tomlkit's tables for TOML."""


def add_key(path: Path, name: str, fields: Mapping[str, Any]) -> str:
    """Append an entry to a key file, which is created if it does not exist. Returns the new key.

    Args:
        fields: further fields of ``KeyEntry``, without the name and the digest.

    Raises:
        ConfigError: a key of this name exists, a field is wrong, or the file cannot be read or written.
    """
    secret = new_secret()

    def append(entries: Entries) -> None:
        if any(entry["name"] == name for entry in entries):
            raise ConfigError(f"{path} already has a key {name}. Try: rootgraft key rotate {name}")
        entry = {"name": name, "sha256": _digest(secret), **fields}
        entries.append(_table(entry, is_first=not entries) if path.suffix == ".toml" else entry)

    _change(path, append, can_be_new=True)
    return secret


def rotate_key(path: Path, name: str) -> str:
    """Replace the key of an entry. Returns the new key; the old one is no longer valid. Raises ConfigError."""
    secret = new_secret()

    def replace(entries: Entries) -> None:
        entries[_place(path, entries, name)]["sha256"] = _digest(secret)

    _change(path, replace)
    return secret


def revoke_key(path: Path, name: str) -> None:
    """Remove an entry. Raises ConfigError, also for the last entry, because a server refuses a file without keys."""

    def remove(entries: Entries) -> None:
        place = _place(path, entries, name)
        if len(entries) == 1:
            raise ConfigError(
                f"{name} is the last key in {path}, and a server keeps its last key. Add another key first."
            )
        del entries[place]

    _change(path, remove)


def _table(entry: Mapping[str, Any], *, is_first: bool) -> Any:
    """Convert an entry to a TOML table, preceded by an empty line unless it is the first one."""
    table = tomlkit.table()
    table.update(entry)
    table.trivia.indent = "" if is_first else "\n"
    return table


def _place(path: Path, entries: Entries, name: str) -> int:
    for place, entry in enumerate(entries):
        if entry["name"] == name:
            return place
    raise ConfigError(f"{path} has no key {name}. Try: rootgraft key list")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _change(path: Path, change: Callable[[Entries], None], *, can_be_new: bool = False) -> None:
    """Change the entries, and write the file if the result is valid. A lock excludes other processes meanwhile."""
    is_toml = path.suffix == ".toml"
    try:
        with _only_writer(path.parent):
            if can_be_new and not path.exists():
                document: Any = tomlkit.document() if is_toml else {}
                document["keys"] = tomlkit.aot() if is_toml else []
            else:
                read_entries(path)
                text = path.read_text("utf-8-sig")
                document = tomlkit.parse(text) if is_toml else orjson.loads(text)
            change(document["keys"])
            check_entries(document.unwrap() if is_toml else document)
            options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
            content = tomlkit.dumps(document).encode() if is_toml else orjson.dumps(document, option=options)
            write_whole(path, content, 0o600)
    except OSError as error:
        raise ConfigError(f"--api-key-file: {path} cannot be written: {error.strerror}.") from error


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Context manager: hold a lock on the folder, which excludes other changes of key files in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
