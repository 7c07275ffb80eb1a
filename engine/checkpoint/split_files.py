"""Names of the files of a model that was split into several (``gguf-split``); without numpy, unlike their reader."""

from __future__ import annotations

import re
from typing import Final

SPLIT_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def without_split(stem: str) -> str:
    """Return a file's name without ending, and without what says which of several files it is."""
    found = SPLIT_NAME.fullmatch(f"{stem}.gguf")
    return stem if found is None else found["stem"]
