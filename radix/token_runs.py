"""Comparing token runs as memory."""

from __future__ import annotations

from array import array


def common_prefix(left: array[int], right: array[int], limit: int) -> int:
    """How many of the first ``limit`` tokens are equal: by halving, so each byte is compared at most twice."""
    high = min(len(left), len(right), limit)
    width = left.itemsize
    tokens = left.tobytes()  # bytes.startswith compares memory; == of memoryviews goes item by item
    with memoryview(right) as view:
        if tokens.startswith(view[:high]):
            return high
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            if tokens.startswith(view[low:middle], low * width):
                low = middle
            else:
                high = middle
    return low
