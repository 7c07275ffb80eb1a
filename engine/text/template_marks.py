"""Template marks: finds marks in rendered chat templates, and common prefixes and suffixes that cut no mark."""

from __future__ import annotations

import re

# Matches a mark such as ``<|im_end|>``, ``</think>`` or ``[BEGIN FINAL RESPONSE]``.
MARK = re.compile(r"<[^<>]*>|\[[A-Z_/ ]+\]")


def num_shared(text: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    least = min(len(text), len(other))
    return next((at for at in range(least) if text[at] != other[at]), least)


def shared_beginning(text: str, other: str) -> int:
    """Return the end of the common prefix of two texts in ``text``.

    A mark of which only a part is common is excluded.
    """
    at = num_shared(text, other)
    inside = _mark_around(text, at)
    return at if inside is None else inside.start()


def shared_end(text: str, other: str) -> int:
    """Return the start of the common suffix of two texts in ``text``.

    A mark of which only a part is common is excluded.
    """
    at = len(text) - num_shared(text[::-1], other[::-1])
    inside = _mark_around(text, at)
    return at if inside is None else inside.end()


def _mark_around(text: str, at: int) -> re.Match[str] | None:
    return next((mark for mark in MARK.finditer(text) if mark.start() < at < mark.end()), None)
