"""Caches bounded by bytes: the least recently used entries leave, however large each of them is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

ENTRY_BYTES = 300  # what an entry takes beside its value and the texts in its key


class SizedCache:
    """Values by key within a limit of bytes. Thread-safe.

    Attributes:
        num_bytes: size of all entries, as ``size`` gave it.
    """

    def __init__(self, most_bytes: int) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """Return a value and mark it as the last one used; None where there is none."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: Any, num_bytes: int) -> None:
        """Keep a value, which must not be None, in place of those not used for longest; not one beyond the limit."""
        size = num_bytes + ENTRY_BYTES
        with self._lock:
            self.num_bytes -= self._entries.pop(key, (None, 0))[1]
            if size > self._most_bytes:
                return
            self.num_bytes += size
            self._entries[key] = value, size
            while self.num_bytes > self._most_bytes:
                self.num_bytes -= self._entries.popitem(last=False)[1][1]

    def __len__(self) -> int:
        return len(self._entries)


def sized_cache(most_bytes: int, size: Callable[..., int]) -> Callable[[F], F]:
    """Cache a function's results within a limit of bytes. Exceptions are not cached.

    Args:
        size: returns the estimated size in bytes, given the result (the first argument) and the function's positional
            arguments.
    """

    def decorate(function: F) -> F:
        cache = SizedCache(most_bytes)

        @wraps(function)
        def cached(*arguments: Any, **named: Any) -> Any:
            key = arguments, *named.items()
            found = cache.get(key)
            if found is None:
                found = (function(*arguments, **named),)
                cache.put(key, found, size(found[0], *arguments))
            return found[0]

        cached.cache = cache  # type: ignore[attr-defined]
        return cached  # type: ignore[return-value]

    return decorate
