"""How many threads the native kernels use. Their pool is their own: torch's count says nothing about it."""

from __future__ import annotations

import torch

_count = torch.get_num_threads()


def count() -> int:
    """Threads of a native op, the calling one included."""
    return _count


def set_count(value: int) -> None:
    """From now on, for all calling threads."""
    global _count
    _count = value
