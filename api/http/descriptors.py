"""File descriptors: how many connections a process may have, so that some are left for files and child processes."""

from __future__ import annotations

import os
import resource
from functools import cache

WANTED = 1 << 16  # descriptors of a process, where its hard limit allows them
_RESERVE = 64
_aside = 0  # descriptors for connections of gRPC


def raise_limit() -> None:
    """Raise the process's soft limit of descriptors as far as it may and needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> int:
    """Return how many connections of HTTP may be open beside those of gRPC."""
    return max(1, connection_room() - _aside)


def set_aside(wanted: int) -> int:
    """Set descriptors aside for connections of gRPC. Returns how many: those wanted, but a quarter of all at most."""
    global _aside
    _aside = min(wanted, max(1, connection_room() // 4))
    return _aside


@cache
def connection_room() -> int:
    """Return how many connections of both may be open beside the descriptors in use at first and a reserve."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    soft = WANTED if soft == resource.RLIM_INFINITY else soft
    return max(1, soft - len(os.listdir("/proc/self/fd")) - min(_RESERVE, soft // 4))
