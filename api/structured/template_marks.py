"""Template marks: marks in what chat templates render, and what two such texts share without cutting one in two."""

from __future__ import annotations

import re

# ``<|im_end|>``, ``</think>``, ``[BEGIN FINAL RESPONSE]``.
MARK = re.compile(r"<[^<>]*>|\[[A-Z_/ ]+\]")


def num_shared(text: str, other: str) -> int:
    """Return the number of characters that two texts begin with."""
    least = min(len(text), len(other))
    return next((at for at in range(least) if text[at] != other[at]), least)


def shared_beginning(text: str, other: str) -> int:
    """Return where in a text its common beginning with another ends, before a mark that only begins alike."""
    at = num_shared(text, other)
    inside = _mark_around(text, at)
    return at if inside is None else inside.start()


def shared_end(text: str, other: str) -> int:
    """Return where in a text its common end with another begins, behind a mark that only ends alike."""
    at = len(text) - num_shared(text[::-1], other[::-1])
    inside = _mark_around(text, at)
    return at if inside is None else inside.end()


def _mark_around(text: str, at: int) -> re.Match[str] | None:
    return next((mark for mark in MARK.finditer(text) if mark.start() < at < mark.end()), None)
