"""When a sequence is at its end, and for what reason."""

from __future__ import annotations

from typing import NamedTuple

from engine.messages import Failed
from engine.sequence import Sequence
from engine.types import FinishReason


class Ending(NamedTuple):
    """Why a sequence ends, and the token that ends it if that is a stop token, which is no part of the answer."""

    reason: FinishReason
    stop_token: int | None = None


def remaining(sequence: Sequence, max_model_len: int) -> int:
    """Tokens that a sequence may still generate, by its own limit and by the model's length."""
    return min(sequence.remaining, max_model_len - sequence.num_tokens)


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
