"""Files of KV blocks whose reads and writes fail as disks fail: short, refused, full, or with other bytes."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

from rootgraft.engine.kv_cache.block_codec import BlockCodec
from rootgraft.engine.kv_cache.block_files import BlockFiles
from rootgraft.engine.kv_cache.kv_stores import DiskStore, HostStore, KvStore
from rootgraft.engine.kv_cache.kv_tiers import KvTiers
from rootgraft.engine.kv_cache.make_tiers import KvPages, make_scheme


class FaultyFiles(BlockFiles):
    """``BlockFiles`` that fail at some of their hooks.

    Attributes:
        rng: draws which.
        rate: share of the reads and of the writes that fail.
        num_faults: failed so far.
    """

    def __init__(self, folder: Path, rng: random.Random, rate: float) -> None:
        super().__init__(folder)
        self.rng, self.rate = rng, rate
        self.num_faults = 0

    def write_parts(self, fd: int, parts: list[memoryview]) -> None:
        fault = self._fault(("short", "EIO", "ENOSPC", "corrupt", "stops"))
        if fault is None:
            return super().write_parts(fd, parts)
        part = memoryview(b"".join(parts))
        if fault in ("EIO", "ENOSPC"):
            os.write(fd, part[: len(part) // 2])
            raise OSError(getattr(errno, fault), fault)
        if fault == "corrupt":
            return super().write_parts(fd, [self._flipped(part)])
        if fault == "short":  # all is written, in two calls
            os.write(fd, part[: len(part) // 3])
            return super().write_parts(fd, [part[len(part) // 3 :]])
        os.write(fd, part[: len(part) // 3])  # what a loss of power leaves of a file that has its name already
        return None

    def read_into(self, fd: int, data: memoryview) -> int:
        fault = self._fault(("short", "EIO", "corrupt"))
        if fault == "EIO":
            raise OSError(errno.EIO, fault)
        if fault == "short":
            return super().read_into(fd, data[: self.rng.randrange(len(data))])
        length = super().read_into(fd, data)
        if fault == "corrupt" and length:
            data[:length] = self._flipped(data[:length])
        return length

    def _fault(self, kinds: tuple[str, ...]) -> str | None:
        if self.rng.random() >= self.rate:
            return None
        self.num_faults += 1
        return self.rng.choice(kinds)

    def _flipped(self, data: memoryview) -> memoryview:
        """Return a copy in which one bit is another one."""
        changed = bytearray(data)
        if changed:
            changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
        return memoryview(changed)


def cramped_tiers(
    config_options: dict[str, object],
    pages: KvPages,
    folder: Path,
    rng: random.Random,
    *,
    rate: float,
    host_pages: int,
    disk_pages: int,
    inline: bool,
    key: bytes = b"",
) -> KvTiers:
    """Return tiers with room for few pages over faulty files."""
    from rootgraft.engine.config import EngineConfig

    scheme, _ = make_scheme(EngineConfig(block_size=config_options["block_size"]), pages)  # type: ignore[arg-type]
    stores: list[KvStore] = []
    if host_pages:
        stores.append(HostStore(host_pages * scheme.page_bytes))
    if disk_pages:
        file_bytes = scheme.page_bytes + 4096 + 16
        stores.append(DiskStore(FaultyFiles(folder, rng, rate), BlockCodec(scheme, key), disk_pages * file_bytes))
    return KvTiers(scheme, pages, stores, most_fetched=rng.choice((1, 6, 1000)) * scheme.page_bytes, inline=inline)
