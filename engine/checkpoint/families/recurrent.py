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


@dataclass(frozen=True, slots=True)
class Mamba2Layer:
    """A selective state space behind a convolution (Mamba-2; Granite 4).

    Attributes:
        num_heads: H.
        head_dim: P.
        num_groups: groups of heads with the same B and C.
        state_size: N.
        taps: of the convolution.
        conv_biased: the convolution has a bias.
        biased: the projections have biases.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    taps: int
    conv_biased: bool
    biased: bool

    @property
    def width(self) -> int:
        """Columns of the gate, and of x."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Columns of x, B and C, which the convolution sees."""
        return self.width + 2 * self.num_groups * self.state_size


RecurrentLayer = ShortConvLayer | Mamba2Layer
