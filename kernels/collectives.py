"""Collectives of tensor-parallel ranks, over ``torch.distributed``: gloo between CPUs, NCCL between GPUs.

``ALONE`` is the only rank of a group of one; everything else asks ``Ranks.size`` before it imports this library's
process groups, so a model on one device makes none.

Every rank calls the same collectives in the same order. A call raises RuntimeError where another rank has gone.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo"


class Ranks(Protocol):
    """The processes that compute one model together, as one of them sees it.

    Attributes:
        rank: this one, from 0 on; rank 0 draws the tokens.
        size: how many there are.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def add(self, part: Tensor) -> Tensor:
        """Replace a contiguous tensor by its sum over the ranks, the same bits on each, and return it."""

    def gather(self, part: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, of one shape and type, on rank 0; on the others none."""

    def least(self, number: int) -> int:
        """Return the least number of a rank."""

    def close(self) -> None:
        """Leave the group."""


class Alone:
    """The only rank: each collective is the identity."""

    rank, size = 0, 1

    def add(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor) -> list[Tensor]:
        return [part]

    def least(self, number: int) -> int:
        return number

    def close(self) -> None:
        return


ALONE: Ranks = Alone()


class ProcessGroup:
    """A rank of a process group of ``torch.distributed``. A process is in one group at a time.

    Args:
        rank, size: as in ``Ranks``.
        store: a file that the ranks of this group alone know; it is made by the first one.
        device: of the tensors.
        seconds: for which a rank waits for the others in one call.

    Raises:
        RuntimeError: the group does not come about.
    """

    def __init__(self, rank: int, size: int, store: Path, device: torch.device, seconds: float) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore

        self.rank, self.size = rank, size
        self._device = device
        self._dist = dist
        os.environ.setdefault(_INTERFACE, _LOOPBACK)  # the ranks are on one machine
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=FileStore(str(store), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
            device_id=device if device.type == "cuda" else None,
        )
        self._is_open = True
        try:
            self.least(rank)  # a topology that cannot work fails here and not in the first step
        except BaseException:
            self.close()
            raise

    def add(self, part: Tensor) -> Tensor:
        """All-reduce in place: the sum over all ranks, on each of them."""
        if part.numel():
            self._dist.all_reduce(part)
        return part

    def gather(self, part: Tensor) -> list[Tensor]:
        """Gather: the parts of all ranks, in their order, on rank 0; nothing on the others."""
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        if part.numel():
            self._dist.gather(part, parts, dst=0)
        return parts or []

    def least(self, number: int) -> int:
        """Return the least of the ranks' numbers, on each of them."""
        value = torch.tensor([number], dtype=torch.int64, device=self._device)
        self._dist.all_reduce(value, self._dist.ReduceOp.MIN)
        return int(value.item())

    def close(self) -> None:
        """Leave the group. Has no effect the second time."""
        # A later group of this process belongs to somebody else.
        if self._is_open:
            self._is_open = False
            self._dist.destroy_process_group()
