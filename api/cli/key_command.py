"""``rootgraft key add``, ``list``, ``rotate`` and ``revoke``: manage the keys of ``--api-key-file``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..access.api_keys import KeyEntry, read_entries
from ..access.key_file import add_key, revoke_key, rotate_key
from .machine.text_table import text_table
from .options import KeyAddOptions, KeyListOptions, KeyNameOptions

_HEAD = ("NAME", "TENANT", "SCOPES", "PRIORITY", "REQUESTS/MIN", "TOKENS/MIN", "SHA-256", "ADAPTERS")


def add(options: KeyAddOptions) -> int:
    """Write a new key's entry, and print the key, which is not stored. Returns 0. Raises ConfigError."""
    fields = {
        "tenant": options.tenant,
        "scopes": None if options.scopes == ("inference",) else list(options.scopes),
        "adapters": list(options.adapters) or None,
        "requests_per_minute": options.requests_per_minute,
        "tokens_per_minute": options.tokens_per_minute,
        "priority": None if options.priority == "interactive" else options.priority,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    _show(add_key(Path(options.api_key_file), options.name, given))
    return 0


def rotate(options: KeyNameOptions) -> int:
    """Replace a key, and print the new one. Returns 0. Raises ConfigError."""
    _show(rotate_key(Path(options.api_key_file), options.name))
    return 0


def revoke(options: KeyNameOptions) -> int:
    """Remove a key. Returns 0. Raises ConfigError."""
    revoke_key(Path(options.api_key_file), options.name)
    return 0


def list_keys(options: KeyListOptions) -> int:
    """Print the keys of a file without their secrets. Returns 0. Raises ConfigError."""
    entries = read_entries(Path(options.api_key_file))
    if options.json:
        print(json.dumps([entry.model_dump(mode="json", exclude_none=True) for entry in entries], indent=2))
    else:
        print(text_table(_HEAD, [_row(entry) for entry in entries]))
    return 0


def _show(key: str) -> None:
    """Print a key on standard output, for programs, and a hint for the user on standard error."""
    print("The key is shown only once. A running server accepts it within a second:", file=sys.stderr, flush=True)
    print(key)


def _row(entry: KeyEntry) -> tuple[str, ...]:
    limits = ("-" if each is None else str(each) for each in (entry.requests_per_minute, entry.tokens_per_minute))
    adapters = "all" if entry.adapters is None else ", ".join(entry.adapters) or "none"
    scopes = ", ".join(entry.scopes)
    return entry.name, entry.tenant or entry.name, scopes, entry.priority, *limits, entry.sha256[:8], adapters
