"""File descriptors: limits the number of connections, so that files and child processes get descriptors too."""

from __future__ import annotations

import os
import resource
from functools import cache

WANTED = 1 << 16  # Wanted number of descriptors of a process, if its hard limit allows them.
_RESERVE = 64
_aside = 0  # Number of descriptors set aside for gRPC connections.


def raise_limit() -> None:
    """Raise the process's soft limit of file descriptors to ``WANTED``, or as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> int:
    """Return the largest number of HTTP connections that may be open in addition to those of gRPC."""
    return max(1, connection_room() - _aside)


def set_aside(wanted: int) -> int:
    """Set descriptors aside for gRPC connections. Returns their number: ``wanted``, but at most a quarter of all."""
    global _aside
    _aside = min(wanted, max(1, connection_room() // 4))
    return _aside


@cache
def connection_room() -> int:
    """Return the number of HTTP and gRPC connections for which enough descriptors are available.

    A reserve, and the descriptors in use at first, are not available for connections.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    soft = WANTED if soft == resource.RLIM_INFINITY else soft
    return max(1, soft - len(os.listdir("/proc/self/fd")) - min(_RESERVE, soft // 4))
