"""Collectives of tensor-parallel ranks, over ``torch.distributed``: gloo between CPUs, NCCL between GPUs.

``ALONE`` is the only rank of a group of one. All other code checks ``Ranks.size`` before it imports the process groups
of this library, so a model on one device creates none.

Every rank calls the same collectives in the same order. Between CPUs, a call raises RuntimeError if another rank has
ended. Between GPUs, a call waits until ``ProcessGroup.abort`` or the end of the process ends it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as DistributedGroup
    from torch.distributed import Work

_MOST_SENT = 2  # Limit of tensors that are being sent.
_INTERFACE = "GLOO_SOCKET_IFNAME"
_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_END_PROCESS, _DO_NOTHING = "3", "0"
_LOOPBACK = "lo"


class Ranks(Protocol):
    """The processes that compute one model together, from the view of one of them.

    Attributes:
        rank: number of this process, from 0; rank 0 draws the tokens.
        size: number of processes.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def add(self, part: Tensor) -> Tensor:
        """Replace a contiguous tensor by its sum over the ranks, with the same bits on each, and return it."""

    def gather(self, part: Tensor) -> list[Tensor]:
        """Return, on rank 0, the tensors of all ranks, of one shape and type; on other ranks an empty list."""

    def least(self, number: int) -> int:
        """Return the smallest of the ranks' numbers."""

    def send(self, part: Tensor, to: int) -> None:
        """Send a tensor to a rank, which receives tensors in order. It must not be changed afterwards."""

    def receive(self, out: Tensor, source: int) -> None:
        """Wait for the next tensor from a rank, which has the shape and type of ``out``."""

    def split(self, size: int) -> Ranks:
        """Return this rank's group, if each ``size`` consecutive ranks form a group."""

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
        rank, size: see ``Ranks``.
        store: a file that only the ranks of this group know; the first rank creates it. Between CPUs it may be removed
            when the group is formed; NCCL reads it later too.
        device: device of the tensors.
        seconds: seconds for which a rank waits for the others in one call.
        part_size: number of consecutive ranks that form a part of the group.
        may_end: whether torch's watchdog may end this process when a communicator of GPUs fails or waits for too long.
            If not, the caller must call ``abort``.

    Raises:
        RuntimeError: the group cannot be formed.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Path,
        device: torch.device,
        seconds: float,
        part_size: int = 1,
        *,
        may_end: bool = True,
    ) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore

        self.rank, self.size = rank, size
        self._device = device
        self._dist = dist
        self._sent: deque[tuple[Work, Tensor]] = deque()  # Tensors are kept until they are sent.
        os.environ.setdefault(_INTERFACE, _LOOPBACK)  # The ranks are on one machine.
        with _environment(_ON_ERROR, _END_PROCESS if may_end else _DO_NOTHING):
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
                # A topology that cannot work fails here and not in the first step. And all are done with the store.
                self.least(rank)
            except BaseException:
                self.close()
                raise

    def _make_parts(self, size: int) -> DistributedGroup | None:
        if size in (1, self.size):
            return None
        found: DistributedGroup | None = None
        for first in range(0, self.size, size):  # All ranks must make all parts.
            group = self._dist.new_group(range(first, first + size))
            found = group if first <= self.rank < first + size else found
        return found

    def add(self, part: Tensor) -> Tensor:
        """All-reduce in place: each rank gets the sum over all ranks."""
        return self.add_in(None, part)

    def gather(self, part: Tensor) -> list[Tensor]:
        """Gather: rank 0 gets the parts of all ranks in order; the other ranks get nothing."""
        return self.gather_in(None, part, 0, self.size)

    def add_in(self, group: DistributedGroup | None, part: Tensor) -> Tensor:
        """All-reduce in place over a part of the group, or over the whole group if ``group`` is None."""
        if part.numel():
            self._dist.all_reduce(part, group=group)
        return part

    def gather_in(self, group: DistributedGroup | None, part: Tensor, first: int, size: int) -> list[Tensor]:
        """Gather over a part of the group, which has ``size`` ranks, to its rank ``first``."""
        parts = [torch.empty_like(part) for _ in range(size)] if self.rank == first else None
        if part.numel():
            self._dist.gather(part, parts, dst=first, group=group)
        return parts or []

    def least(self, number: int) -> int:
        """Return, on each rank, the smallest of the ranks' numbers."""
        value = torch.tensor([number], dtype=torch.int64, device=self._device)
        self._dist.all_reduce(value, self._dist.ReduceOp.MIN)
        return int(value.item())

    def send(self, part: Tensor, to: int) -> None:
        """Start sending a tensor. If two others are still being sent, wait for the first of them."""
        while len(self._sent) >= _MOST_SENT:
            self._sent.popleft()[0].wait()
        if part.numel() and (work := self._dist.isend(part, to)) is not None:
            self._sent.append((work, part))

    def receive(self, out: Tensor, source: int) -> None:
        """Wait for the next tensor from a rank."""
        if out.numel():
            self._dist.recv(out, source)

    def split(self, size: int) -> Ranks:
        """Return this rank's part of the group: all ranks, this one alone, or ``part_size`` ranks."""
        if size == self.size:
            return self
        if size == 1:
            return ALONE
        assert self._part is not None and size == self._part_size
        return PartGroup(self, size, self._part)

    def abort(self) -> None:
        """End the calls that wait in a communicator of GPUs, on any thread, and leave the group.

        The result of such a call is not a sum. Gloo needs no abort, because its calls fail when a socket closes. This
        returns at once, because NCCL's own abort may take long.
        """
        if self._is_open and self._device.type == "cuda":
            self._is_open = False
            # This function aborts the group and its parts together, so that none of them waits for another.
            abort = self._dist.distributed_c10d._abort_process_group
            threading.Thread(target=abort, name="rank-abort", daemon=True).start()

    def close(self) -> None:
        """Leave the group. A second call has no effect."""
        # By then the process may be in another group, which must not be left.
        if self._is_open:
            self._is_open = False
            self._dist.destroy_process_group()


class PartGroup:
    """A rank of a part of a process group: ``size`` consecutive ranks, which add and gather among themselves.

    Args:
        whole: the process group; it must exist as long as this part.
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
        """Return the smallest number of any rank of the whole group."""
        return self._whole.least(number)

    def send(self, part: Tensor, to: int) -> None:
        self._whole.send(part, self._first + to)

    def receive(self, out: Tensor, source: int) -> None:
        self._whole.receive(out, self._first + source)

    def split(self, size: int) -> Ranks:
        raise AssertionError("a part has no parts")

    def close(self) -> None:
        """Do nothing: the code that made the whole group leaves it."""


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable only within a block of code, because an application in this process may have its own groups."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
