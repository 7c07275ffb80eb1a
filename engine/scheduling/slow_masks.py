"""Slow masks: fills token masks that take long on a separate thread, before the step that needs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from ..sequence.sequence import Sequence
from .step_plan import StepPlan

# Values added to the niceness (lower scheduling priority) of these threads, so that slow masks leave the cores to the
# step loop and its kernels. Replays get a higher priority than masks, because the client of a replayed sequence has
# already received tokens and waits for the next one.
NICENESS, REPLAY_NICENESS = 15, 5


class SlowMasks:
    """Fills token masks that take long on a separate thread, so that steps do not wait for them.

    An ordinary mask is filled during the forward pass of its step, and the step waits for it. If a sequence's last mask
    took long, filling its next mask begins as soon as the tokens before it are known, and the sequence skips steps
    until the mask is ready.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammar-slow-masks", _lower_priority, (NICENESS,))
        self._replays = ThreadPoolExecutor(1, "grammar-replays", _lower_priority, (REPLAY_NICENESS,))
        for pool in (self._thread, self._replays):
            # The thread is started now, because later there may be no memory for it.
            pool.submit(int)

    def begin(self, sequence: Sequence, ahead: Iterable[StepPlan] = ()) -> None:
        """Start to fill the next mask of a sequence if filling it is likely to take long.

        Args:
            sequence: a waiting or running sequence.
            ahead: steps in flight. If one of them has a row of the sequence, that step requests the mask itself.
        """
        matcher, remaining = sequence.matcher, sequence.remaining
        if matcher and matcher.is_slow(remaining) and not any(sequence.id in step.rows for step in ahead):
            matcher.fill_ahead(self._thread, remaining)

    def replay(self, sequence: Sequence) -> None:
        """Start to advance the grammar of a waiting sequence by the tokens that another engine generated for it.

        This runs on a separate thread, because a token may need a search for a completion that fits into the remaining
        tokens, and such a search may take as long as a slow mask.
        """
        if sequence.matcher:
            generated = sequence.tokens[sequence.num_prompt :]
            sequence.matcher.replay_ahead(self._replays, generated, sequence.remaining + len(generated))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._replays.shutdown(cancel_futures=True)


def _lower_priority(by: int) -> None:
    # Only on Linux does each thread have its own niceness; elsewhere it belongs to the whole process.
    if sys.platform == "linux":
        os.nice(by)
