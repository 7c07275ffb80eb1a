"""Cores and memory that this process may use, within affinity, ``ulimit -v`` and cgroup limits (versions 1 and 2)."""

from __future__ import annotations

import math
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_MOST_KV = 4 << 30
_FEW_THREADS = 8  # up to so many hardware threads are all used, as on the machines that were measured


@dataclass(frozen=True, slots=True)
class Cores:
    """Processors.

    Attributes:
        machine: number of processors of the whole machine, counting hardware threads.
        physical: number of physical cores of the machine, None if the system does not report it.
        affinity: number of processors that this process may run on.
        quota: processor seconds a second that its cgroups allow; None without a limit.
        socket: numbers of the processors of the affinity that are in one socket: the socket with the most cores.
        socket_cores: number of cores among them; hardware threads of one core count once.
    """

    machine: int
    physical: int | None
    affinity: int
    quota: float | None
    socket: frozenset[int]
    socket_cores: int

    @property
    def usable(self) -> int:
        """Threads that can all run at once."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota)))

    @property
    def compute_threads(self) -> int:
        """Number of threads of an engine: with more than a few processors, one for each core of one socket.

        A second hardware thread of a core would not help, because both share the core's multipliers, and each op waits
        for its slowest thread.
        """
        return self.usable if self.affinity <= _FEW_THREADS else min(self.usable, self.socket_cores)

    @property
    def has_other_sockets(self) -> bool:
        """Whether such an engine leaves processors of other sockets alone."""
        return self.affinity > _FEW_THREADS and len(self.socket) < self.affinity


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory.

    Attributes:
        machine: bytes of the whole machine.
        total: bytes that this process may use: the machine's, or the limit of its cgroup or of its address space.
        available: bytes of ``total`` that can still be taken.
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
    allowed = frozenset(os.sched_getaffinity(0))
    sockets = [socket & allowed for socket in _sockets(root) if socket & allowed]
    socket = max(sockets, key=lambda each: _num_cores(root, each), default=allowed)
    return Cores(
        os.cpu_count() or 1,
        psutil.cpu_count(logical=False),
        len(allowed),
        min(quotas, default=None),
        socket,
        _num_cores(root, socket),
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
    if (space := _address_space(root)) is not None and space[0] < machine.total:
        total, available = min(total, space[0]), min(available, space[1])
    return Memory(int(machine.total), total, available)


def kv_pool_bytes(found: Memory, utilization: float) -> int:
    """Return the default size of a KV pool on a CPU: what that share of the memory leaves, at most 4 GiB."""
    return min(_MOST_KV, int(found.available - (1 - utilization) * found.total))


def check_room(num_bytes: int) -> None:
    """Raise OSError if the system would not give this process so much address space.

    Call it before libraries that end the process if an allocation fails, as Rust libraries do.
    """
    mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()


def open_files() -> tuple[int, int]:
    """Return the soft and the hard limit of open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _sockets(root: Path) -> list[frozenset[int]]:
    """Return the processors of each socket, in the order of their numbers.

    All NUMA nodes of a socket count as one socket. All sockets within one NUMA node count as one socket too, because a
    virtual machine may report a separate socket for each processor.
    """
    system, found = root / "sys/devices/system", list[frozenset[int]]()
    for file in (*system.glob("node/node*/cpulist"), *system.glob("cpu/cpu*/topology/core_siblings_list")):
        joined = _processors(file)
        apart = [each for each in found if not each & joined]
        found = [*apart, joined.union(*(each for each in found if each & joined))]
    return sorted((each for each in found if each), key=min)


def _num_cores(root: Path, processors: frozenset[int]) -> int:
    """Count the cores of processors. A processor without topology information counts as a core."""
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return len({_processors(root / topology.format(number)) or frozenset({number}) for number in processors})


def _processors(file: Path) -> frozenset[int]:
    """Return the numbers in a list such as ``0-3,8``; none if it cannot be read."""
    found: set[int] = set()
    with suppress(OSError, ValueError):
        for part in file.read_text().strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


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


def _address_space(root: Path) -> tuple[int, int] | None:
    """Return the limit of this process's address space (``ulimit -v``) and what is left of it; None without one."""
    limit, used = None, 0
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/limits").read_text().splitlines():
            if line.startswith("Max address space") and (soft := line.split()[3]) != "unlimited":
                limit = int(soft)
        used = int((root / "proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return None if limit is None else (limit, max(0, limit - used))


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
