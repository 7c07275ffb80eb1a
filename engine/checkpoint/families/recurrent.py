"""Layers with a recurrent state in place of attention, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

SelectionNorms = Literal["none", "plain", "weighted"]


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
        normed: its results have a norm; without, the gate alone is a factor of them (Falcon H1).
        is_norm_first: the gate is a factor of the norm's result, not of what it norms.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    taps: int
    conv_biased: bool
    biased: bool
    normed: bool = True
    is_norm_first: bool = False

    @property
    def width(self) -> int:
        """Columns of the gate, and of x."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Columns of x, B and C, which the convolution sees."""
        return self.width + 2 * self.num_groups * self.state_size


@dataclass(frozen=True, slots=True)
class MambaLayer:
    """A selective state space with a state for each channel, behind a convolution (Mamba, Jamba).

    Attributes:
        width: channels, all with a state of their own; as many as the gate has.
        state_size: N.
        taps: of the convolution.
        step_rank: inputs of the projection to steps.
        conv_biased: the convolution has a bias.
        biased: the projections of hidden states have biases.
        norms: RMS norms of B, C and what steps are made of, with or without a weight.
        norm_eps: of these.
    """

    width: int
    state_size: int
    taps: int
    step_rank: int
    conv_biased: bool
    biased: bool
    norms: SelectionNorms = "none"
    norm_eps: float = 0.0

    num_heads: ClassVar[int] = 1

    @property
    def head_dim(self) -> int:
        """Channels: with those of Mamba-2's states, this has one head of so many dimensions."""
        return self.width

    @property
    def conv_width(self) -> int:
        """Columns that the convolution sees."""
        return self.width


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """A gated delta net behind a convolution (Qwen3-Next, Qwen 3.5).

    Attributes:
        num_heads: H, of values.
        head_dim: P, of a value.
        num_key_heads: of queries and keys.
        key_dim: N, of a query and a key.
        taps: of the convolution.
        grouped: the projections' columns are those of key head after key head (Qwen3-Next).
    """

    num_heads: int
    head_dim: int
    num_key_heads: int
    key_dim: int
    taps: int
    grouped: bool

    @property
    def width(self) -> int:
        """Columns of values, and of the gate."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Columns of keys, and of queries."""
        return self.num_key_heads * self.key_dim

    @property
    def conv_width(self) -> int:
        """Columns of q, k and v, which the convolution sees."""
        return 2 * self.key_width + self.width


@dataclass(frozen=True, slots=True)
class KimiDeltaLayer:
    """A gated delta net whose state's rows shrink each by a factor of its own (Kimi Linear).

    Attributes:
        num_heads: H, of queries, keys and values.
        head_dim: of all of these, P.
        taps: of the convolution.
    """

    num_heads: int
    head_dim: int
    taps: int

    @property
    def state_size(self) -> int:
        """Rows of a head's state."""
        return self.head_dim

    @property
    def width(self) -> int:
        """Columns of queries, of keys, of values, of steps and of the gate."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Columns of q, k and v, which the convolution sees."""
        return 3 * self.width


RecurrentLayer = ShortConvLayer | MambaLayer | Mamba2Layer | DeltaLayer | KimiDeltaLayer
