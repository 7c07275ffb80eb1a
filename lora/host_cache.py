"""Host cache: LRU cache of prepared adapters in host memory, limited in bytes. Pinned adapters are not evicted."""

from __future__ import annotations

from collections import Counter, OrderedDict

from .prepare_factors import PreparedAdapter


class HostCache:
    """Prepared adapters by digest, so that content with two names occupies memory once.

    An embedding or a head that several adapters have in common is stored once, too.

    Pinned adapters (at most one per slot) and one further adapter are kept even if they exceed the limit.

    Attributes:
        max_bytes: largest size of the cached adapters in bytes.
        num_bytes: bytes of the cached adapters.
        hits: number of lookups that found their adapter.
        misses: number of lookups that did not find their adapter.
        num_evicted: number of adapters evicted so far.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.hits = 0
        self.misses = 0
        self.num_evicted = 0
        # The least recently used adapter comes first.
        self._adapters: OrderedDict[str, PreparedAdapter] = OrderedDict()
        self._pins: Counter[str] = Counter()
        # Number of adapters that use a matrix of an own embedding or head, by the matrix's key.
        self._matrices: Counter[str] = Counter()

    def get(self, digest: str) -> PreparedAdapter | None:
        """Return an adapter and mark it most recently used; None if it is not cached."""
        adapter = self._adapters.get(digest)
        if adapter is None:
            self.misses += 1
            return None
        self.hits += 1
        self._adapters.move_to_end(digest)
        return adapter

    def put(self, adapter: PreparedAdapter) -> None:
        """Cache an adapter and evict others until all fit. An adapter with the same digest stays."""
        if adapter.digest not in self._adapters:
            self._adapters[adapter.digest] = adapter
            self._add(adapter)
        self._adapters.move_to_end(adapter.digest)
        self._shrink(keep=adapter.digest)

    def pin(self, digest: str) -> None:
        """Protect a cached adapter until ``unpin`` is called as often. Raises KeyError if it is not cached."""
        if digest not in self._adapters:
            raise KeyError(digest)
        self._pins[digest] += 1

    def unpin(self, digest: str) -> None:
        """Undo one ``pin``. Raises KeyError if the adapter is not pinned."""
        if not self._pins[digest]:
            raise KeyError(digest)
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]
            self._shrink(keep=None)

    def drop(self, digest: str) -> None:
        """Drop an adapter that is no longer registered, unless it is pinned."""
        if digest in self._adapters and not self._pins[digest]:
            self._remove(digest)

    def __len__(self) -> int:
        return len(self._adapters)

    def __contains__(self, digest: str) -> bool:
        return digest in self._adapters

    def _shrink(self, keep: str | None) -> None:
        if self.num_bytes <= self.max_bytes:
            return
        for digest in [digest for digest in self._adapters if not self._pins[digest] and digest != keep]:
            if self.num_bytes <= self.max_bytes:
                return
            self._remove(digest)
            self.num_evicted += 1

    def _add(self, adapter: PreparedAdapter) -> None:
        self.num_bytes += adapter.num_bytes
        for matrix in adapter.own.matrices if adapter.own else ():
            self.num_bytes -= matrix.num_bytes if self._matrices[matrix.key] else 0
            self._matrices[matrix.key] += 1

    def _remove(self, digest: str) -> None:
        adapter = self._adapters.pop(digest)
        self.num_bytes -= adapter.num_bytes
        for matrix in adapter.own.matrices if adapter.own else ():
            self._matrices[matrix.key] -= 1
            if self._matrices[matrix.key]:
                self.num_bytes += matrix.num_bytes
            else:
                del self._matrices[matrix.key]
