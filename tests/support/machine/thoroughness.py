"""How often tests of random inputs repeat: a share in each pass, all of it on demand.

The inputs of a pass are the same each time, as its seeds are. So the share shows that the property is tested and holds,
and what finds new inputs is a thorough run after a change of what the test is of: ``ROOTGRAFT_THOROUGH=1 pytest PATH``.
"""

from __future__ import annotations

import os

_SHARE = 3  # a third


def repeats(count: int) -> int:
    """Return how many of ``count`` inputs a test takes: a third, at least four, or all in a thorough run."""
    return count if os.environ.get("ROOTGRAFT_THOROUGH") == "1" else min(count, max(4, count // _SHARE))
