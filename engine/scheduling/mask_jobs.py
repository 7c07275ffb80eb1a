"""The masks of rows under a grammar: which ones a step needs, and those that are filled before it is planned."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from ..batch import Batch, Row
from ..sequence.sequence import MaskJob, Sequence
from .step_plan import StepInFlight

NICENESS = 15  # of the thread, which the step loop and its kernels need not share their cores with


def mask_jobs(batch: Batch, owner: Callable[[Row], Sequence | None]) -> list[MaskJob]:
    """The masks that a batch needs, by the rows that draw under a grammar, in their order.

    Args:
        batch: with all tokens before it known.
        owner: the sequence of a row, None if it has left.
    """
    jobs, line = [], 0
    for row in batch.rows:
        sequence = owner(row)
        if row.draws and sequence and sequence.matcher:
            early = max(0, sequence.params.min_tokens - sequence.num_generated)
            scored = sequence.params.logprobs is not None
            jobs.append(MaskJob(line, sequence.matcher, row.drafts, sequence.remaining, early, scored))
        line += row.num_positions
    return jobs


class SlowMasks:
    """A mask is filled beside the forward pass of its step, which waits for it. Where the last one took long, the next
    is begun as soon as the tokens before it are known, and its sequence sits out the steps until it is there.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammar-slow-masks", _step_back)
        self._under_way: dict[int, Future[None]] = {}

    def begin(self, sequence: Sequence, ahead: Iterable[StepInFlight] = ()) -> None:
        """Begin the next mask of a sequence if it is likely to take long.

        Args:
            sequence: waits or runs.
            ahead: steps under way; one with a row of the sequence is about to ask for that mask itself.
        """
        matcher = sequence.matcher
        if matcher is None:
            return
        left = sequence.remaining
        if matcher.is_slow(left) and not any(sequence.id in step.rows for step in ahead):
            self._under_way[sequence.id] = self._thread.submit(matcher.prepare, left)

    def is_filling(self, sequence: Sequence) -> bool:
        """Whether a mask of the sequence is not there yet: nobody else may touch its matcher."""
        filling = self._under_way.get(sequence.id)
        if filling is None:
            return False
        if filling.done():
            del self._under_way[sequence.id]
            return False
        return True

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        if filling := self._under_way.pop(sequence.id, None):
            filling.cancel()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


def _step_back() -> None:
    if sys.platform == "linux":  # elsewhere niceness is that of the whole process
        os.nice(NICENESS)
