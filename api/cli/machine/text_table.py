"""Text tables for the terminal. A column is as wide as its longest cell; the last is wrapped. Sizes and times."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from ...printable import printable


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Format rows below a head. The last column is wrapped at the terminal's width."""
    head, *rows = [[printable(cell) for cell in row] for row in (head, *rows)]
    total = width or shutil.get_terminal_size().columns
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)][:-1]
    left = max(20, total - sum(widths) - 2 * len(widths))
    lines: list[str] = []
    for *cells, last in (head, *rows):
        start = "".join(f"{cell:{size}}  " for cell, size in zip(cells, widths, strict=True))
        first, *rest = textwrap.wrap(last, left, break_on_hyphens=False, break_long_words=False) or [""]
        lines += [(start + first).rstrip(), *(" " * len(start) + each for each in rest)]
    return "\n".join(lines)


def bytes_text(count: float) -> str:
    """Return a size in powers of ten, like the sizes of disks: ``98 MB``, ``4.1 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}" if count < 10 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def duration_text(seconds: float) -> str:
    """Return a time span in its two largest units: ``3 d 4 h``, ``12 min 5 s``."""
    whole = max(0, int(seconds))
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next((number for number, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])


def ago_text(moment: float) -> str:
    """Return the time since a moment in its largest unit: ``3 days ago``."""
    seconds = max(0.0, time.time() - moment)
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if count := int(seconds // size):
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def path_text(path: Path) -> str:
    """Return a path with ``~`` for the home folder."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)
