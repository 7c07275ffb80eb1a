"""Page allocator: the free list of KV pages."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """A free list of page ids 0 ... ``num_pages`` - 1. The page freed last is handed out first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\1" * num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_pages(self) -> tuple[int, ...]:
        return tuple(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Take pages. ValueError, and nothing is taken, if that many are not free."""
        if not 0 <= num_pages <= len(self._free):
            raise ValueError(f"cannot allocate {num_pages} pages: {len(self._free)} of {self.num_pages} are free")
        kept = len(self._free) - num_pages
        pages = self._free[kept:][::-1]
        del self._free[kept:]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Free pages. ValueError at the first that is free already or unknown; those before it are freed."""
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"there is no page {page}: ids go from 0 to {self.num_pages - 1}")
            if self._is_free[page]:
                raise ValueError(f"page {page} is freed twice")
            self._is_free[page] = 1
            self._free.append(page)
