"""How long a device waits for the host in a step: the time between what it computes.

A step has two parts that the device computes without a pause: the forward pass, and the draw with the head before it.
What the host does beside them, planning, masks, commit, messages, is hidden if it is done while they run. Then the next
part begins where the last one ended.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.measure import Machine
from rootgraft.engine.executor.model_runner import ModelRunner


class WaitingTimes:
    """The beginnings and ends of the parts of all steps, as the device passes them.

    A part's beginning is noted when the host is about to launch it. Where the device waits already, what the host still
    prepares then counts as computed: so a wait is at least as long as said.

    Args:
        machine: a GPU tells its own times; on a CPU, which computes when it is told to, they are those of the calls.
    """

    def __init__(self, machine: Machine) -> None:
        self._on_gpu = machine.device.type == "cuda"
        self._marks: list[Any] = []  # beginning, end, beginning ...
        self._num_parts = 0
        self._firsts: list[int] = []  # the part with which each step begins

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note the parts of the steps that are run inside."""
        with ExitStack() as stack:
            stack.enter_context(patch.object(ModelRunner, "forward", self._around(ModelRunner.forward, True)))
            stack.enter_context(patch.object(ModelRunner, "draw", self._around(ModelRunner.draw, False)))
            yield

    def median(self, num_steps: int) -> float:
        """Seconds that the device waited in each of the last steps: before the draw, and before the next one."""
        if self._on_gpu:
            torch.cuda.synchronize()
        gaps = [self._seconds(*self._marks[i : i + 2]) for i in range(1, len(self._marks) - 1, 2)]
        steps = [sum(gaps[first : first + 2]) for first in self._firsts[:-1]]
        return statistics.median(steps[-num_steps:])

    def _around(self, part: Callable[..., Any], is_first: bool) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if is_first:
                self._firsts.append(self._num_parts)
            self._num_parts += 1
            self._mark()
            result = part(*args)
            self._mark()
            return result

        return run

    def _mark(self) -> None:
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self._on_gpu else end - begin
