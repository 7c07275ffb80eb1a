"""What a sequence takes over of a step, and whether it is at its end then, for what reason."""

from __future__ import annotations

from typing import NamedTuple

from ..batch import Row, RowResult
from ..messages import Failed
from ..types import FinishReason
from .sequence import Sequence


class Ending(NamedTuple):
    """Why a sequence ends, and the token that ends it if that is a stop token, which is no part of the answer."""

    reason: FinishReason
    stop_token: int | None = None


class Taken(NamedTuple):
    """What a sequence has taken over.

    Attributes:
        kept: of the tokens drawn, how many the client is to see.
        num_stood: drafts that stood.
        failed: there was no token that may be drawn, or the grammar refused the one that was.
        ends: if the last token ends the sequence.
    """

    kept: int
    num_stood: int
    failed: bool
    ends: Ending | None


def take(sequence: Sequence, row: Row, outcome: RowResult) -> Taken:
    """Append what a step drew for a sequence, as far as it does not end before; its matcher goes along."""
    kept, ends = 0, None
    num_stood = len(outcome.tokens) - (row.draws and not outcome.failed)
    sequence.num_scored += len(outcome.prompt_logprobs)
    sequence.num_drafted += min(num_stood, row.num_drafts)
    sequence.num_forced += outcome.num_forced
    if sequence.matcher and row.draws:
        sequence.matcher.rollback(sequence.matcher.num_tokens - sequence.num_generated - num_stood)
    for place, token in enumerate(outcome.tokens):
        sequence.tokens.append(token)
        if sequence.matcher and place >= num_stood and not sequence.matcher.accept(token):
            return Taken(kept, num_stood, True, None)
        ends = ending(sequence, token, sequence.remaining)
        kept += ends is None or ends.stop_token is None
    return Taken(kept, num_stood, outcome.failed, ends)


def ending(sequence: Sequence, token: int, num_remaining: int) -> Ending | None:
    """Whether the token just appended ends its sequence.

    A structured answer that is complete when its tokens are used up has not been cut: it ends with stop.
    """
    matcher = sequence.matcher
    if token in sequence.stop_ids and sequence.num_generated > sequence.params.min_tokens:
        return Ending(FinishReason.STOP, token)
    if matcher and matcher.is_done:
        return Ending(FinishReason.STOP, token)
    if num_remaining > 0:
        return None
    return Ending(FinishReason.STOP if matcher and matcher.is_whole else FinishReason.LENGTH)


def failure(sequence: Sequence) -> Failed:
    """What the client is told of a sequence that cannot go on, because of its logits or of its grammar."""
    reason = sequence.matcher and sequence.matcher.failure
    if reason:
        return Failed(sequence.id, "ModelError", f"The grammar of this request could not be followed: {reason}.")
    return Failed(sequence.id, "ModelError", "The model gave no token for this request that may be drawn.")
