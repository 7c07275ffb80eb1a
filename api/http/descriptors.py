"""File descriptors: how many connections a process may have, so that some are left for files and child processes."""

from __future__ import annotations

import os
import resource
from functools import cache

WANTED = 1 << 16  # descriptors of a process, where its hard limit allows them
_RESERVE = 64


def raise_limit() -> None:
    """Raise the process's soft limit of descriptors as far as it may and needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@cache
def most_connections() -> int:
    """Return how many connections may be open beside the descriptors in use at the first call and a reserve."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    soft = WANTED if soft == resource.RLIM_INFINITY else soft
    return max(1, soft - len(os.listdir("/proc/self/fd")) - min(_RESERVE, soft // 4))
