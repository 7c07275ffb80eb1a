"""Template marks: finds marks in rendered chat templates, and the common parts of two texts without cutting a mark."""

from __future__ import annotations

import re

# Matches ``<|im_end|>``, ``</think>``, ``[BEGIN FINAL RESPONSE]``.
MARK = re.compile(r"<[^<>]*>|\[[A-Z_/ ]+\]")


def num_shared(text: str, other: str) -> int:
    """Return the number of characters at the beginning that two texts share."""
    least = min(len(text), len(other))
    return next((at for at in range(least) if text[at] != other[at]), least)


def shared_beginning(text: str, other: str) -> int:
    """Return the end of the beginning that two texts share. A mark of which they share only a part is left out."""
    at = num_shared(text, other)
    inside = _mark_around(text, at)
    return at if inside is None else inside.start()


def shared_end(text: str, other: str) -> int:
    """Return the start of the end that two texts share. A mark of which they share only a part is left out."""
    at = len(text) - num_shared(text[::-1], other[::-1])
    inside = _mark_around(text, at)
    return at if inside is None else inside.end()


def _mark_around(text: str, at: int) -> re.Match[str] | None:
    return next((mark for mark in MARK.finditer(text) if mark.start() < at < mark.end()), None)
