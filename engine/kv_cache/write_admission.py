"""Write admission: decides whether a page that no tier has should be written to the tiers.

Writing a page takes a fortieth of the time of computing it. So tiers accept all computed pages until they have been
filled once. After that, while less than one page in forty is used again, they accept only pages that are seen a second
time: in the pool, or computed again after their eviction. So prompts that never recur cost almost nothing, and do not
evict prompts that recur.
"""

from __future__ import annotations

from collections import OrderedDict

_WRITES_OF_A_HIT = 40  # so many writes of a page take as long as computing one, which a hit saves
_MOST_SEEN = 1 << 17  # so many keys of pages that were not written are remembered


class WriteAdmission:
    """Decides which pages to write, from how many of the pages offered earlier were used again. Called by one thread.

    Args:
        num_pages: number of pages that the largest tier has room for.

    Attributes:
        is_selective: whether only pages that are seen a second time are written.
    """

    def __init__(self, num_pages: int) -> None:
        self.is_selective = False
        self._window = max(1, num_pages)  # pages offered from one decision to the next
        self._num_offered = self._num_wanted = 0
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def admits(self, key: bytes, num_pages: int = 1) -> bool:
        """Return whether to write a block that no tier has.

        Args:
            num_pages: number of pages that take as many bytes as the block.
        """
        self._num_offered += num_pages
        if self._num_offered >= self._window:
            self.is_selective = self._num_wanted * _WRITES_OF_A_HIT < self._num_offered
            self._num_offered = self._num_wanted = 0
        if key in self._seen:
            del self._seen[key]
            self.want(num_pages)
            return True
        if not self.is_selective:
            return True
        self._seen[key] = None
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return False

    def want(self, num_pages: int) -> None:
        """Note that pages were wanted again that were seen before."""
        self._num_wanted += num_pages
        if self.is_selective and self._num_wanted * _WRITES_OF_A_HIT >= self._window:
            self.is_selective = False
            self._num_offered = self._num_wanted = 0
