"""Mask jobs of structured output: the token masks that the rows of a step of the model or its draft model need."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ..batch import Batch, Row
from .guarded_matcher import GuardedMatcher
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class MaskJob:
    """The masks to fill for one row of a step: one for each sampling position.

    Attributes:
        line: the row's first sampling position in the batch.
        matcher: matcher of the row; filling the masks advances it by the drafts.
        drafts: drafts of the row.
        remaining: number of tokens that the sequence may still generate.
        num_early: number of next tokens that come before ``min_tokens`` is reached. None of these is in ``late_ids``,
            unless the grammar allows nothing else.
        scored: whether logprobs are requested. The model then runs even if a mask allows only one token.
        vocabulary: vocabulary of the matcher, as in ``Submit``.
        late_ids: as in ``SequenceSpec``.
    """

    line: int
    matcher: GuardedMatcher
    drafts: Seq[int]
    remaining: int
    num_early: int
    scored: bool
    vocabulary: str = ""
    late_ids: frozenset[int] = frozenset()


def mask_jobs(batch: Batch, owner: Callable[[Row], Sequence | None]) -> list[MaskJob]:
    """Return the masks that a batch needs: one job for each row that draws under a grammar, in the order of the rows.

    Args:
        batch: each matcher has accepted the ``num_generated`` tokens before its row; in a step of a draft model the
            last of these tokens are drafts.
        owner: returns the sequence of a row, None if the sequence has left the row.
    """
    jobs, line = [], 0
    for row in batch.rows:
        sequence = owner(row)
        if row.draws and sequence and sequence.matcher:
            remaining = sequence.remaining - (row.num_generated - sequence.num_generated)
            early = max(0, sequence.params.min_tokens - row.num_generated)
            params = sequence.params
            scored = params.logprobs is not None or params.allowed_logprobs
            fields = (remaining, early, scored, sequence.spec.vocabulary, sequence.spec.late_ids)
            jobs.append(MaskJob(line, sequence.matcher, row.drafts, *fields))
        line += row.num_positions
    return jobs
