"""How often tests of random inputs repeat, and which cases of large sets a pass takes: a share, and all on demand.

The inputs of a pass are the same each time, as its seeds are. So the share shows that the property is tested and holds,
and what finds new inputs is a thorough run after a change of what the test is of: ``ROOTGRAFT_THOROUGH=1 pytest PATH``.

Cases of a set that is written down have their turns: the commit draws those of a pass, as it draws the level of the CPU
that some tests are held down to. A thorough run takes all of them.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_SHARE = 3  # a third


def is_thorough() -> bool:
    """Return whether this run is to take all inputs and all cases."""
    return os.environ.get("ROOTGRAFT_THOROUGH") == "1"


def repeats(count: int) -> int:
    """Return how many of ``count`` inputs a test takes: a third, at least four, or all in a thorough run."""
    return count if is_thorough() else min(count, max(4, count // _SHARE))


def taking_turns(cases: Sequence[T], share: int, place: int = 0) -> list[T]:
    """Return the cases that the commit draws, one in ``share``, or all in a thorough run.

    Args:
        cases: the whole set.
        share: after so many turns in a row all cases were taken.
        place: of this set among several of the same cases, which then take different ones.
    """
    return list(cases) if is_thorough() else list(cases[(turn() + place) % share :: share])


@functools.cache
def turn() -> int:
    """Return the number that the commit has drawn: the first digits of its name, or 0 outside of a repository."""
    with suppress(OSError):
        command = ["git", "rev-parse", "HEAD"]
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return int(found.stdout[:8] or "0", 16)
    return 0
