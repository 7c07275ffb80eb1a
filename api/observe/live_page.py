"""The files of the live page: read once, sent as they are, with headers that let them talk to this server alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

_FOLDER = Path(__file__).parents[1] / "ui"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}

INDEX: Final = "index.html"
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": "; ".join(f"{kind} {source}" for kind, source in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""No script but our own files, nothing from elsewhere, no frame around it."""

FILES: Final[Mapping[str, bytes]] = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir())}
"""All files by name."""

PATHS: Final = frozenset({"/ui", "/ui/", *(f"/ui/{name}" for name in FILES if name != INDEX)})
"""Where they are. They hold no data, so they need no key; what they show comes from ``/ui/state``, which does."""


def content_type(name: str) -> str:
    """The type of a file, by the end of its name."""
    return _TYPES[Path(name).suffix]
