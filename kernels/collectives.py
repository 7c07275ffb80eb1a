"""Collectives of tensor-parallel ranks, over ``torch.distributed``: gloo between CPUs, NCCL between GPUs.

``ALONE`` is the only rank of a group of one; everything else asks ``Ranks.size`` before it imports this library's
process groups, so a model on one device makes none.

Every rank calls the same collectives in the same order. A call raises RuntimeError where another rank has gone.
"""

from __future__ import annotations

import os
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as DistributedGroup
    from torch.distributed import Work

_MOST_SENT = 2  # tensors under way
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo"


class Ranks(Protocol):
    """The processes that compute one model together, from the view of one of them.

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

    def send(self, part: Tensor, to: int) -> None:
        """Send a tensor to a rank, which receives it in the order of what it is sent. Nobody changes it any more."""

    def receive(self, out: Tensor, source: int) -> None:
        """Wait for the next tensor that a rank sends, of this shape and type."""

    def split(self, size: int) -> Ranks:
        """Return this rank's group where so many ranks after one another are a group each."""

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

    def send(self, part: Tensor, to: int) -> None:
        raise AssertionError("there is no other rank")

    def receive(self, out: Tensor, source: int) -> None:
        raise AssertionError("there is no other rank")

    def split(self, size: int) -> Ranks:
        return self

    def close(self) -> None:
        return


ALONE: Ranks = Alone()


class ProcessGroup:
    """A rank of a process group of ``torch.distributed``. A process is in one group at a time, and in parts of it.

    Args:
        rank, size: as in ``Ranks``.
        store: a file that the ranks of this group alone know; it is made by the first one.
        device: device of the tensors.
        seconds: seconds for which a rank waits for the others in one call.
        part_size: ranks after one another that are a part of the group. The store need not live once these are made.

    Raises:
        RuntimeError: the group does not come about.
    """

    def __init__(
        self, rank: int, size: int, store: Path, device: torch.device, seconds: float, part_size: int = 1
    ) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore

        self.rank, self.size = rank, size
        self._device = device
        self._dist = dist
        self._sent: deque[tuple[Work, Tensor]] = deque()  # tensors live until they have left
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
            self._part_size, self._part = part_size, self._make_parts(part_size)
            # A topology that cannot work fails here and not in the first step. And all ranks are done with the store.
            self.least(rank)
        except BaseException:
            self.close()
            raise

    def _make_parts(self, size: int) -> DistributedGroup | None:
        if size in (1, self.size):
            return None
        found: DistributedGroup | None = None
        for first in range(0, self.size, size):  # all ranks make all of them
            group = self._dist.new_group(range(first, first + size))
            found = group if first <= self.rank < first + size else found
        return found

    def add(self, part: Tensor) -> Tensor:
        """All-reduce in place: the sum over all ranks, on each of them."""
        return self.add_in(None, part)

    def gather(self, part: Tensor) -> list[Tensor]:
        """Gather: the parts of all ranks, in their order, on rank 0; nothing on the others."""
        return self.gather_in(None, part, 0, self.size)

    def add_in(self, group: DistributedGroup | None, part: Tensor) -> Tensor:
        """All-reduce in place over a part of the group; None for all of it."""
        if part.numel():
            self._dist.all_reduce(part, group=group)
        return part

    def gather_in(self, group: DistributedGroup | None, part: Tensor, first: int, size: int) -> list[Tensor]:
        """Gather over a part of the group, of so many ranks, on its ``first`` one."""
        parts = [torch.empty_like(part) for _ in range(size)] if self.rank == first else None
        if part.numel():
            self._dist.gather(part, parts, dst=first, group=group)
        return parts or []

    def least(self, number: int) -> int:
        """Return the least of the ranks' numbers, on each of them."""
        value = torch.tensor([number], dtype=torch.int64, device=self._device)
        self._dist.all_reduce(value, self._dist.ReduceOp.MIN)
        return int(value.item())

    def send(self, part: Tensor, to: int) -> None:
        """Begin to send a tensor; with two others still under way, wait for the first of them."""
        while len(self._sent) >= _MOST_SENT:
            self._sent.popleft()[0].wait()
        if part.numel() and (work := self._dist.isend(part, to)) is not None:
            self._sent.append((work, part))

    def receive(self, out: Tensor, source: int) -> None:
        """Wait for the next tensor of a rank."""
        if out.numel():
            self._dist.recv(out, source)

    def split(self, size: int) -> Ranks:
        """Return this rank's part of the group, of all ranks, one, or ``part_size``."""
        if size == self.size:
            return self
        if size == 1:
            return ALONE
        assert self._part is not None and size == self._part_size
        return PartGroup(self, size, self._part)

    def close(self) -> None:
        """Leave the group. Has no effect the second time."""
        # A later group of this process belongs to somebody else.
        if self._is_open:
            self._is_open = False
            self._dist.destroy_process_group()


class PartGroup:
    """A rank of a part of a process group: ``size`` ranks after one another, which add and gather among themselves.

    Args:
        whole: the group, which lives as long.
        group: the group of ``torch.distributed``.
    """

    def __init__(self, whole: ProcessGroup, size: int, group: DistributedGroup) -> None:
        self.rank, self.size = whole.rank % size, size
        self._whole = whole
        self._group = group

    @property
    def _first(self) -> int:
        return self._whole.rank - self.rank

    def add(self, part: Tensor) -> Tensor:
        return self._whole.add_in(self._group, part)

    def gather(self, part: Tensor) -> list[Tensor]:
        return self._whole.gather_in(self._group, part, self._first, self.size)

    def least(self, number: int) -> int:
        """Return the least number of a rank of the whole group."""
        return self._whole.least(number)

    def send(self, part: Tensor, to: int) -> None:
        self._whole.send(part, self._first + to)

    def receive(self, out: Tensor, source: int) -> None:
        self._whole.receive(out, self._first + source)

    def split(self, size: int) -> Ranks:
        raise AssertionError("a part has no parts")

    def close(self) -> None:
        """Have no effect: the whole group is left by who made it."""
