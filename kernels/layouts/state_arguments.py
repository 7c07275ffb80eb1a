"""Argument records of ops with a recurrent state: per step, for all layers, and per convolution."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateBatch:
    """Where the rows of a ragged batch find and leave their states: slots of a pool [slots, ...].

    A slot that one row reads is written by no other row of the batch.

    Attributes:
        query_start: [R + 1] int32, row r owns tokens ``query_start[r]:query_start[r + 1]``.
        source: [R] int32, slot of the state before the row's first token, -1 for zeros.
        target: [R] int32, slot that gets the state after its last token; it may be the source.
        checkpoints: [T] int32, slot that gets the state after this token too, -1 for none.
    """

    query_start: Tensor
    source: Tensor
    target: Tensor
    checkpoints: Tensor


@dataclass(frozen=True, slots=True)
class ConvParams:
    """A causal convolution of each channel with the inputs before it.

    Attributes:
        weight: [taps, W], the tap of the newest input last.
        bias: [W] or None.
        gated: the input is the product of two, and the result is multiplied by a third (LFM2). Else the result passes
            SiLU.
    """

    weight: Tensor
    bias: Tensor | None
    gated: bool
