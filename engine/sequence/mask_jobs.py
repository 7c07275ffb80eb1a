"""Mask jobs of structured output: the token masks that the rows of a step need, the target's or its draft model's."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ..batch import Batch, Row
from .guarded_matcher import GuardedMatcher
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class MaskJob:
    """The masks to fill for a row of a step: one for each sampling position.

    Attributes:
        line: the row's first sampling position in the batch.
        matcher: filling advances it by the drafts.
        drafts: the row's drafts.
        remaining: tokens that the sequence may still generate.
        num_early: number of next tokens that come before ``min_tokens``: the answer must not end at these unless the
            grammar allows nothing else.
        scored: logprobs are requested, so the model is run even where the mask allows a single token.
        vocabulary: vocabulary of the matcher, as in ``Submit``.
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
        batch: each matcher has accepted the ``num_generated`` tokens before its row; in a step of a draft model the
            last of them are drafts.
        owner: returns the sequence of a row, None if it has left the row.
    """
    jobs, line = [], 0
    for row in batch.rows:
        sequence = owner(row)
        if row.draws and sequence and sequence.matcher:
            remaining = sequence.remaining - (row.num_generated - sequence.num_generated)
            early = max(0, sequence.params.min_tokens - row.num_generated)
            params = sequence.params
            scored = params.logprobs is not None or params.allowed_logprobs
            fields = (remaining, early, scored, sequence.spec.vocabulary)
            jobs.append(MaskJob(line, sequence.matcher, row.drafts, *fields))
        line += row.num_positions
    return jobs
