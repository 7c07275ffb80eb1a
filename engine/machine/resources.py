"""Cores and memory that this process may use, within affinity and cgroup limits (versions 1 and 2)."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_MOST_KV = 4 << 30


@dataclass(frozen=True, slots=True)
class Cores:
    """Processors.

    Attributes:
        machine: of the whole machine, hardware threads counted.
        physical: cores of it, None where the system does not tell.
        affinity: that this process may run on.
        quota: processor seconds a second that its cgroups allow; None without a limit.
    """

    machine: int
    physical: int | None
    affinity: int
    quota: float | None

    @property
    def usable(self) -> int:
        """Threads that can all run at once."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota)))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory.

    Attributes:
        machine: of the whole machine.
        total: that this process may use: the machine's, or its cgroup's limit.
        available: of those, that can still be taken.
    """

    machine: int
    total: int
    available: int

    @property
    def is_limited(self) -> bool:
        return self.total < self.machine


def cores(root: Path = Path("/")) -> Cores:
    """Return the processors of this process; ``root`` holds ``proc`` and ``sys``."""
    quotas = [quota for folder in _folders(root, "cpu") if (quota := _quota(folder)) is not None]
    return Cores(
        os.cpu_count() or 1,
        psutil.cpu_count(logical=False),
        len(os.sched_getaffinity(0)),
        min(quotas, default=None),
    )


def memory(root: Path = Path("/")) -> Memory:
    """Return the memory of this process; ``root`` holds ``proc`` and ``sys``."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for folder in _folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is not None and limit < machine.total:
            total = min(total, limit)
            available = min(available, max(0, limit - _used(folder)))
    return Memory(int(machine.total), total, available)


def kv_pool_bytes(found: Memory, utilization: float) -> int:
    """Return the default size of a KV pool on a CPU: what that share of the memory leaves, at most 4 GiB."""
    return min(_MOST_KV, int(found.available - (1 - utilization) * found.total))


def open_files() -> tuple[int, int]:
    """Return the soft and the hard limit of open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the cgroups of this process for a controller, outwards, whose limits all hold."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            if number != "0" and controller not in names.split(","):
                continue
            base = root / "sys/fs/cgroup" if number == "0" else root / "sys/fs/cgroup" / controller
            own = base / path.strip("/")
            # Inside of a container the path may be the host's, and the cgroup is mounted at the base.
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(base))


def _quota(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _used(folder: Path) -> int:
    """Return the bytes that a cgroup cannot give back: without the files that it caches."""
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name in ("inactive_file", "total_inactive_file"):
                return max(0, used - int(value))
    return used


def _number(path: Path) -> int | None:
    """Return the number in a file; None for no file, and for ``max``."""
    with suppress(OSError, ValueError):
        value = float(path.read_text())
        return int(value) if math.isfinite(value) else None
    return None
