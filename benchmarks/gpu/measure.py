"""How a time is taken, and what a line of the results holds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch

from rootgraft.kernels.triton.launch import Launch

Call = Callable[[], object]


@dataclass(frozen=True)
class Machine:
    """Device and data type of all measurements, and whether this is only a rehearsal on a CPU with tiny sizes."""

    device: torch.device
    dtype: torch.dtype
    tiny: bool

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Line:
    """One result. ``floor`` is what the ceilings say it could be at best, in the same unit, where there is one."""

    part: str
    name: str
    value: float
    unit: str
    floor: float | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """How much of the ceiling is reached: floor / value for a time."""
        return None if self.floor is None or not self.value else self.floor / self.value


@dataclass(frozen=True)
class Ceilings:
    """Rates that the device reached here: bytes a second of a copy (read and written) and of a read, flops a second."""

    copy: float
    read: float
    flops: float

    def seconds(self, *, read: float = 0.0, copied: float = 0.0, flops: float = 0.0) -> float:
        """The least time for so much work: the slower of memory and arithmetic."""
        return max(read / self.read + copied / self.copy, flops / self.flops)


def seconds(machine: Machine, calls: Sequence[Call], repeats: int = 10) -> float:
    """Seconds of one of the calls, which must work on so much memory together that no cache holds it.

    On a GPU all calls are captured in a graph, so that the host's part is not measured; the median of some replays.
    """
    begin = time.perf_counter()
    for call in calls:
        call()
    if machine.tiny:
        return (time.perf_counter() - begin) / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def synchronize(machine: Machine) -> None:
    """Wait until the device has done all it was given."""
    if machine.device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def launches() -> Iterator[set[str]]:
    """The names of the Triton kernels that run inside."""
    names: set[str] = set()
    run = Launch.run

    def noting(launch: Launch) -> None:
        names.add(launch.kernel.__name__)
        run(launch)

    with patch.object(Launch, "run", noting):
        yield names
