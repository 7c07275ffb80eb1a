"""``rootgraft key``: make an API key, and the lines for ``--api-key-file``."""

from __future__ import annotations

import sys

from ..access.api_keys import new_key
from .options import KeyOptions


def make_key(options: KeyOptions) -> int:
    """Print a new key on standard error, and the lines that let a server know it on standard output. Returns 0."""
    key, lines = new_key(options.name)
    print(f"The key, which is shown only now: {key}", file=sys.stderr)
    print(lines)
    return 0
