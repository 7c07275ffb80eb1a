"""Mask jobs of structured output: which masks a step needs, and slow ones that are filled before their step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..batch import Batch, Row
from ..sequence.guarded_matcher import GuardedMatcher
from ..sequence.sequence import Sequence
from .step_plan import StepInFlight

NICENESS = 15  # of the thread of slow masks, so that it leaves the cores to the step loop and its kernels


@dataclass(frozen=True, slots=True)
class MaskJob:
    """The masks to fill for a row of a step: one for each sampling position.

    Attributes:
        line: the row's first sampling position in the batch.
        matcher: filling advances it by the drafts.
        drafts: the row's drafts.
        remaining: tokens that the sequence may still generate.
        num_early: of the next tokens, how many come before ``min_tokens``: at these the answer must not end unless the
            grammar allows nothing else.
        scored: logprobs are requested, so the model is run even where the mask allows a single token.
        vocabulary: of the matcher, as in ``Submit``.
    """

    line: int
    matcher: GuardedMatcher
    drafts: Seq[int]
    remaining: int
    num_early: int
    scored: bool
    vocabulary: str = ""


def mask_jobs(batch: Batch, owner: Callable[[Row], Sequence | None]) -> list[MaskJob]:
    """Return the masks that a batch needs, by its rows that draw under a grammar, in their order.

    Args:
        batch: with all tokens before it known.
        owner: returns the sequence of a row, None if it has left the row.
    """
    jobs, line = [], 0
    for row in batch.rows:
        sequence = owner(row)
        if row.draws and sequence and sequence.matcher:
            early = max(0, sequence.params.min_tokens - sequence.num_generated)
            scored = sequence.params.logprobs is not None
            fields = (sequence.remaining, early, scored, sequence.vocabulary)
            jobs.append(MaskJob(line, sequence.matcher, row.drafts, *fields))
        line += row.num_positions
    return jobs


class SlowMasks:
    """Fills slow masks before their step.

    A mask is filled beside the forward pass of its step, which waits for it. Where the last one took long, the next one
    begins as soon as the tokens before it are known, and its sequence sits out the steps until it is there.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammar-slow-masks", _lower_priority)

    def begin(self, sequence: Sequence, ahead: Iterable[StepInFlight] = ()) -> None:
        """Begin the next mask of a sequence if it is likely to take long.

        Args:
            sequence: waiting or running.
            ahead: steps in flight; one with a row of the sequence asks for that mask itself.
        """
        matcher, remaining = sequence.matcher, sequence.remaining
        if matcher and matcher.is_slow(remaining) and not any(sequence.id in step.rows for step in ahead):
            matcher.fill_ahead(self._thread, remaining)

    def replay(self, sequence: Sequence) -> None:
        """Begin to advance the grammar of a waiting sequence by tokens that another engine generated.

        The search for a short completion may take long at each of them, as for a slow mask.
        """
        if sequence.matcher:
            generated = sequence.tokens[sequence.num_prompt :]
            sequence.matcher.replay_ahead(self._thread, generated, sequence.remaining + len(generated))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere niceness is that of the whole process
        os.nice(NICENESS)
