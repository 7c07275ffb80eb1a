"""Prefix transfer: saves the KV of prompts to files, and loads it from files. Called on the core's thread."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path as FilePath
from typing import BinaryIO

from ...radix.namespace import ENDLESS, Path
from ..batch import PageLoad, StateLoad
from ..config import EngineConfig
from ..errors import ConfigError
from ..kv_cache.block_codec import BlockCodec, Buffer
from ..kv_cache.block_keys import BlockId
from ..kv_cache.make_tiers import KvPages, make_scheme, plain_scheme
from ..kv_cache.prefix_cache import PrefixCache
from ..kv_cache.prefix_files import StoredPrefix, read_blocks, read_prefix, write_blocks, write_prefix


class PrefixTransfer:
    """Saves prefixes of one prefix cache and its pool, and loads prefixes into them.

    Args:
        base: digest of the base model.
        key_of: options that name the key for encrypting the saved data; None for no encryption.

    Raises:
        ConfigError: the pages of this model cannot be stored outside of the pool, or the key file contains no key.
    """

    def __init__(
        self, cache: PrefixCache, pages: KvPages | None, base: str, key_of: EngineConfig | None = None
    ) -> None:
        if pages is None or pages.refusal:
            raise ConfigError(f"The KV of this model cannot be saved: {pages.refusal if pages else 'it has no pages'}.")
        if not cache.sharing:
            raise ConfigError("Saving and loading prefixes needs --enable-prefix-caching.")
        self._cache, self._pages, self._base = cache, pages, base
        plain = plain_scheme(pages, cache.page_size), b""
        self._codec = BlockCodec(*(plain if key_of is None else make_scheme(key_of, pages)))

    def save(self, path: Path, tokens: array[int], file: FilePath, head: bytes = b"") -> int:
        """Write the cached full pages of a prompt to a file. Returns the number of tokens. Raises OSError."""
        blocks, payload_of = self._cached(path, tokens)
        write_prefix(file, self._codec, blocks, payload_of, head)
        return self._num_tokens(blocks)

    def write(self, path: Path, tokens: array[int], out: BinaryIO, head: bytes) -> int:
        """Write the cached full pages of a prompt to an open file. Returns the number of tokens. Raises OSError."""
        blocks, payload_of = self._cached(path, tokens)
        write_blocks(out, self._codec, blocks, payload_of, head)
        return self._num_tokens(blocks)

    def size(self, num_tokens: int) -> int:
        """Return the approximate size in bytes of a file with the KV of ``num_tokens`` tokens."""
        scheme = self._codec.scheme
        return num_tokens // scheme.page_size * scheme.page_bytes + scheme.state_bytes

    def _num_tokens(self, blocks: list[BlockId]) -> int:
        return sum(not block.is_state for block in blocks) * self._cache.page_size

    def _cached(self, path: Path, tokens: array[int]) -> tuple[list[BlockId], Callable[[int], Buffer]]:
        """Return the cached full pages of a prompt, then its recurrent state, and a function that reads one of them."""
        size, scheme = self._cache.page_size, self._codec.scheme
        state = self._cache.export_state(scheme, path, tokens)
        most = ENDLESS if self._cache.states is None else state[0].position // size + 1 if state else 0
        blocks, pages = self._cache.export(scheme, path, tokens, most=most)
        reads = [partial(self._pages.read_page, page) for page in pages]
        if state:
            blocks.append(state[0])
            reads.append(partial(self._pages.read_state, state[1]))
        return blocks, lambda index: reads[index]()

    def load(self, file: FilePath, offset: int = 0) -> int:
        """Load the pages of a file, from a byte offset on, into the prefix cache. Raises OSError.

        Returns:
            Number of tokens whose KV is now cached, limited by the room in the pool. 0 if the file has no full page, or
            is for another base model, KV format or page size.
        """
        stored = read_prefix(file, self._codec, self._base, "", offset=offset)
        return 0 if stored is None else self._enter(stored)

    def read(self, source: BinaryIO, tenant: str) -> tuple[Path | None, array[int]]:
        """Load a tenant's pages from an open file into the prefix cache. Returns namespaces and cached tokens.

        If ``load`` would return 0, this method returns None and an empty array.
        """
        stored = read_blocks(source, self._codec, self._base, tenant)
        num_tokens = 0 if stored is None else self._enter(stored)
        return (stored.path, stored.tokens[:num_tokens]) if stored is not None and num_tokens else (None, array("i"))

    def _enter(self, stored: StoredPrefix) -> int:
        """Insert pages into the prefix cache, as far as there is room. Returns the number of their tokens."""
        lease, num_tokens = self._cache.import_pages(stored.path, stored.tokens)
        first = lease.num_shared
        loads = [PageLoad(page, stored.payloads[first + i]) for i, page in enumerate(lease.pages[first:])]
        states = [StateLoad(slot, stored.state) for slot in lease.pending.values() if stored.state is not None]
        try:
            self._pages.load([*loads, *states])
        except BaseException:
            self._cache.release(lease, stored.tokens, first * self._cache.page_size)
            raise
        self._cache.commit(lease, stored.tokens, num_tokens)
        self._cache.release(lease, stored.tokens, num_tokens)
        return num_tokens
