"""Draws the CPU level that CI holds some of the tests down to, by the commit, and the folder of these tests."""

from __future__ import annotations

import sys
from typing import NamedTuple

from rootgraft.kernels.cpu.portable_build import BASELINE, LEVELS, own_level

DRAWN_LEVELS = ("avx2", BASELINE)
"""Levels at which all tests of these folders have been run and passed."""
DRAWN_FOLDERS = ("tests/kernels", "tests/engine/models", "tests/engine/sampling", "tests/engine/loading")


class LevelDraw(NamedTuple):
    """The tests of a folder, and the level at which they are run."""

    level: str
    folder: str


def draw_level(commit: str, own: str | None) -> LevelDraw:
    """Return what a commit draws: each level below the machine's own, with each folder, equally often.

    Args:
        commit: its name, hexadecimal.
        own: the machine's level; None if no level is exactly what it has.
    """
    order = [*LEVELS, BASELINE]
    below = [level for level in DRAWN_LEVELS if own is None or order.index(level) > order.index(own)] or [BASELINE]
    number = int(commit[:8], 16)
    return LevelDraw(below[number % len(below)], DRAWN_FOLDERS[number // len(below) % len(DRAWN_FOLDERS)])


if __name__ == "__main__":
    print(*draw_level(sys.argv[1], own_level()))
