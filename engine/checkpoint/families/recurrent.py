"""Layers with a recurrent state in place of attention, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShortConvLayer:
    """``out(C * conv(B * x))`` with ``B, C, x = in(h)``: a convolution over the last few tokens (LFM2).

    Attributes:
        taps: tokens that it sees, the token itself included.
        biased: convolution and projections have biases.
    """

    taps: int
    biased: bool


RecurrentLayer = ShortConvLayer
