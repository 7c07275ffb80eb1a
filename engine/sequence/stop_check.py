"""Stop check: how many tokens of a step a sequence keeps, and whether it ends: stop token, grammar or length."""

from __future__ import annotations

from typing import NamedTuple

from ..batch import Row, RowResult
from ..messages import Failed
from ..types import FinishReason
from .sequence import Sequence


class Stop(NamedTuple):
    """Why a sequence ends.

    Attributes:
        token: the stop token that ended it, which is not part of the output.
        is_limited: a structured output is complete as its tokens are used up, but could have gone on.
    """

    reason: FinishReason
    token: int | None = None
    is_limited: bool = False


class StopCheck(NamedTuple):
    """The outcome for one row, which the scheduler applies to its sequence.

    Attributes:
        num_tokens: of the row's tokens, how many the sequence takes.
        num_sent: of these, how many the client receives.
        num_accepted: accepted drafts.
        failed: the step gave no valid token, or the grammar refused the one it gave.
        stop: set if the sequence ends.
    """

    num_tokens: int
    num_sent: int
    num_accepted: int
    failed: bool
    stop: Stop | None = None


def check_stop(sequence: Sequence, row: Row, result: RowResult) -> StopCheck:
    """Check the tokens of a row one by one, and advance the sequence's grammar by them. Writes no sequence.

    Filling the masks has advanced the grammar by all drafts of the row: rejected ones are rolled back first.
    """
    num_accepted = len(result.tokens) - (row.draws and not result.failed)
    matcher = sequence.matcher
    if matcher and row.draws:
        matcher.rollback_to(sequence.num_generated + num_accepted)
        if matcher.has_failed:
            return StopCheck(0, 0, num_accepted, True)
    for count, token in enumerate(result.tokens, 1):
        if matcher and count > num_accepted and not matcher.accept(token):
            return StopCheck(count, count - 1, num_accepted, True)
        if stop := _stop(sequence, token, count):
            return StopCheck(count, count - (stop.token is not None), num_accepted, result.failed, stop)
    return StopCheck(len(result.tokens), len(result.tokens), num_accepted, result.failed)


def _stop(sequence: Sequence, token: int, count: int) -> Stop | None:
    """Return why ``token``, the ``count``-th of a step, ends its sequence, or None.

    A structured output that is complete when its tokens are used up was not cut: it ends with reason stop.
    """
    matcher = sequence.matcher
    if token in sequence.stop_ids and sequence.num_generated + count > sequence.params.min_tokens:
        return Stop(FinishReason.STOP, token)
    if matcher and matcher.is_done:
        return Stop(FinishReason.STOP, token)
    if sequence.remaining > count:
        return None
    if matcher and matcher.is_whole:
        return Stop(FinishReason.STOP, is_limited=matcher.may_go_on)
    return Stop(FinishReason.LENGTH)


def failure(sequence: Sequence) -> Failed:
    """Return the error message for a sequence that cannot go on, because of its logits or of its grammar."""
    reason = sequence.matcher and sequence.matcher.failure
    if reason:
        return Failed(sequence.id, "ModelError", f"The grammar of this request could not be followed: {reason}.")
    return Failed(sequence.id, "ModelError", "The model gave no token for this request that may be drawn.")
