"""Files of API keys, where a key reads as its name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import orjson


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, **fields: Any) -> dict[str, Any]:
    """A key that reads as its name."""
    return {"name": name, "sha256": sha(name), **fields}


def write(file: Path, *entries: dict[str, Any]) -> None:
    """Replace the file at once, as a careful operator does."""
    new = file.with_suffix(".new")
    new.write_bytes(orjson.dumps({"keys": entries}))
    new.rename(file)
