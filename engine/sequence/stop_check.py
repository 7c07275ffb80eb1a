"""Stop check: how many tokens of a step a sequence keeps, and whether it ends by stop token, grammar or length."""

from __future__ import annotations

from typing import NamedTuple

from ..batch import Row, RowResult
from ..messages import Failed
from ..types import FinishReason
from .sequence import Sequence


class StopCheck(NamedTuple):
    """The result of the check of one row. The scheduler applies it to the row's sequence.

    Attributes:
        num_tokens: number of the row's tokens that the sequence takes.
        num_sent: number of these tokens that the client receives. A stop token, which ends the sequence, is left out.
        num_accepted: number of accepted drafts.
        failed: whether the step gave no valid token, or one that the grammar refused.
        reason: why the sequence ends; None if it goes on.
        stop_token: the token that ended it; None if none did.
        is_limited: whether the sequence ended at its token limit with a structured output that is complete but could
            have gone on.
    """

    num_tokens: int
    num_sent: int
    num_accepted: int
    failed: bool
    reason: FinishReason | None = None
    stop_token: int | None = None
    is_limited: bool = False


def check_stop(sequence: Sequence, row: Row, result: RowResult) -> StopCheck:
    """Check the tokens of a row one by one, and advance the sequence's grammar by them. Changes no sequence.

    Filling the masks has advanced the grammar by all drafts of the row, so rejected drafts are rolled back first.
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
        if end := _end(sequence, token, count):
            _, stop_token, _ = end
            return StopCheck(count, count - (stop_token is not None), num_accepted, result.failed, *end)
    return StopCheck(len(result.tokens), len(result.tokens), num_accepted, result.failed)


def _end(sequence: Sequence, token: int, count: int) -> tuple[FinishReason, int | None, bool] | None:
    """Return ``reason``, ``stop_token`` and ``is_limited`` if ``token``, the ``count``-th of a step, ends its sequence.

    A structured output that is complete at the token limit was not cut off, so its reason is ``stop``.
    """
    matcher = sequence.matcher
    if token in sequence.spec.stop_ids and sequence.num_generated + count > sequence.params.min_tokens:
        return FinishReason.STOP, token, False
    if matcher and matcher.is_done:
        return FinishReason.STOP, token, False
    if sequence.remaining > count:
        return None
    if matcher and matcher.is_whole:
        return FinishReason.STOP, None, matcher.may_go_on
    return FinishReason.LENGTH, None, False


def failure(sequence: Sequence) -> Failed:
    """Return the error message for a sequence that cannot go on because of its logits or its grammar."""
    reason = sequence.matcher and sequence.matcher.failure
    if reason:
        return Failed(sequence.id, "ModelError", f"The grammar of this request could not be followed: {reason}.")
    return Failed(sequence.id, "ModelError", "The model gave no allowed token for this request.")
