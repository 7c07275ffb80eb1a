"""Ranks of one process that take turns: each computes until it waits for the others, in the order of the ranks."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rootgraft.kernels.collectives import ALONE, Ranks

T = TypeVar("T")


def run_ranks(size: int, compute: Callable[[Ranks], T]) -> list[T]:
    """Run the same on each rank of a group. Raises what the first rank that fails raises."""
    group = _Group(size)
    threads = [threading.Thread(target=group.run, args=(rank, compute)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if group.errors:
        raise group.errors[0]
    return [group.results[rank] for rank in range(size)]


class _Group:
    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = 0
        self.parts: list[Any] = [None] * size
        self.shared: Any = None
        self.results: dict[int, Any] = {}
        self.errors: list[BaseException] = []
        self.sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.changed = threading.Condition()

    def run(self, rank: int, compute: Callable[[Ranks], Any]) -> None:
        try:
            self._wait(rank)
            self.results[rank] = compute(_Rank(self, rank))
        except BaseException as error:
            self.errors.append(error)
        self._pass_on(rank)

    def exchange(self, rank: int, part: Any, join: Callable[[list[Any]], Any]) -> Any:
        """Give a part, and return what all parts make once each rank has given its own."""
        self.parts[rank] = part
        self._pass_on(rank)
        self._wait(rank)
        if rank == 0:
            self.shared = join(self.parts)
        return self.shared

    def wait_for(self, rank: int, is_there: Callable[[], bool]) -> None:
        """Let the others have their turns until something is there."""
        while not is_there():
            self._pass_on(rank)
            self._wait(rank)

    def _pass_on(self, rank: int) -> None:
        with self.changed:
            others = [(rank + step) % self.size for step in range(1, self.size + 1)]
            self.turn = next((each for each in others if each not in self.results), 0)
            self.changed.notify_all()

    def _wait(self, rank: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == rank or self.errors)
        if self.errors:
            raise RuntimeError("another rank has failed")


class _Rank:
    def __init__(self, group: _Group, rank: int) -> None:
        self._group = group
        self.rank, self.size = rank, group.size

    def add(self, part: Tensor) -> Tensor:
        return part.copy_(self._group.exchange(self.rank, part.clone(), lambda parts: torch.stack(parts).sum(0)))

    def gather(self, part: Tensor) -> list[Tensor]:
        found: list[Tensor] = self._group.exchange(self.rank, part.clone(), list)
        return found if self.rank == 0 else []

    def least(self, number: int) -> int:
        found: int = self._group.exchange(self.rank, number, min)
        return found

    def send(self, part: Tensor, to: int) -> None:
        self._group.sent[self.rank, to].append(part.clone())

    def receive(self, out: Tensor, source: int) -> None:
        self._group.wait_for(self.rank, lambda: bool(self._group.sent[source, self.rank]))
        out.copy_(self._group.sent[source, self.rank].popleft())

    def split(self, size: int) -> Ranks:
        return self if size == self.size else ALONE

    def close(self) -> None:
        return
