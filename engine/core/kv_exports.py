"""KV exports: reads pages of the prefix cache for other replicas, a limited number of bytes after each step.

In a model with recurrent states, the state after the last page is sent after that page.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from ...kernels.device_memory import DeviceMemoryError, on_device
from ...radix.namespace import Path
from ..kv_cache.block_codec import BlockCodec
from ..kv_cache.make_tiers import KvPages
from ..kv_cache.prefix_cache import PrefixCache
from ..messages import KvBlocks, ReadKv
from ..sequence.sequence import Sequence

STEP_BYTES = 4 << 20
"""Largest number of bytes of pages that are read after one step."""


@dataclass(slots=True, eq=False)
class Export:
    """One read of pages for another replica: the request and its progress.

    Attributes:
        request: the request as received.
        path, tokens: namespaces and tokens of the prefix. If the request only gives the id of a sequence to follow, the
            path is None until the scheduler has that sequence.
        first: index of the next page to read.
        keys: keys of the prefix's pages, as far as they are known.
    """

    request: ReadKv
    path: Path | None
    tokens: array[int]
    first: int
    keys: list[bytes] = field(default_factory=list)


class KvExports:
    """Performs the reads in the order of their arrival.

    Args:
        codec: codec of the blocks; None if pages cannot be read. Then all reads return no pages.
        pages: pages of the pool.
    """

    def __init__(self, codec: BlockCodec | None, pages: KvPages | None) -> None:
        self._codec = codec
        self._pages = pages
        self._exports: list[Export] = []

    @property
    def has_work(self) -> bool:
        return bool(self._exports)

    def add(self, request: ReadKv) -> None:
        """Queue a read."""
        self._exports.append(Export(request, request.path, request.tokens, request.first))

    def poll(
        self, cache: PrefixCache, sequence_of: Callable[[int], Sequence | None], is_open: Callable[[int], bool]
    ) -> list[KvBlocks]:
        """Read pages that are in the cache now, up to ``STEP_BYTES``. Returns the replies.

        Args:
            sequence_of: returns the waiting or running sequence with an id.
            is_open: returns whether the sequence with an id has not ended; it may still wait for its adapter or
                grammar.
        """
        answers: list[KvBlocks] = []
        room = STEP_BYTES
        for export in tuple(self._exports):
            if room <= 0:
                break
            is_followed = self._follow(export, sequence_of, is_open)
            try:
                blocks, is_whole = self._read(export, cache, room)
                is_last = is_whole and not is_followed
                if is_last:
                    blocks += self._read_state(export, cache)
            except DeviceMemoryError:
                # The other replica computes what it was not sent.
                blocks, is_last = [], True
            room -= sum(map(len, blocks))
            if is_last:
                self._exports.remove(export)
            if blocks or is_last:
                answers.append(KvBlocks(export.request.id, tuple(blocks), is_last))
        return answers

    def clear(self) -> list[KvBlocks]:
        """End all reads without further pages. Returns the replies."""
        exports, self._exports = self._exports, []
        return [KvBlocks(export.request.id, (), True) for export in exports]

    def _follow(
        self, export: Export, sequence_of: Callable[[int], Sequence | None], is_open: Callable[[int], bool]
    ) -> bool:
        """Return whether the prompt of the sequence that a read follows is still being computed."""
        number = export.request.follows
        if not number:
            return False
        sequence = sequence_of(number)
        if sequence is None:
            # The sequence may still wait for its adapter or its grammar.
            return is_open(number)
        export.path, export.tokens = sequence.path, sequence.tokens[: sequence.num_prompt]
        return sequence.num_generated == 0

    def _read(self, export: Export, cache: PrefixCache, room: int) -> tuple[list[bytes], bool]:
        """Return the next blocks of a read, and whether the cache has no further blocks for it.

        Raises DeviceMemoryError.
        """
        if self._codec is None or self._pages is None or export.path is None:
            return [], True
        most = max(1, room // self._codec.scheme.page_bytes)
        blocks, pages = cache.export(
            self._codec.scheme, export.path, export.tokens, first=export.first, most=most, keys=export.keys
        )
        export.first += len(blocks)
        read = self._pages.read_page
        found = [
            b"".join(self._codec.encode(block, on_device(read, page)))
            for block, page in zip(blocks, pages, strict=True)
        ]
        return found, len(blocks) < most

    def _read_state(self, export: Export, cache: PrefixCache) -> list[bytes]:
        """Return the block of the prefix's last recurrent state; empty if there are no states, or it is not cached.

        Raises DeviceMemoryError.
        """
        if self._codec is None or self._pages is None or export.path is None:
            return []
        state = cache.export_state(self._codec.scheme, export.path, export.tokens, export.keys)
        return [b"".join(self._codec.encode(state[0], on_device(self._pages.read_state, state[1])))] if state else []
