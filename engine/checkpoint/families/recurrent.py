"""Layers with a recurrent state in place of attention, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

SelectionNorms = Literal["none", "plain", "weighted"]


@dataclass(frozen=True, slots=True)
class ShortConvLayer:
    """``out(C * conv(B * x))`` with ``B, C, x = in(h)``: a convolution over the last few tokens (LFM2).

    Attributes:
        taps: number of tokens that the convolution sees, the current token included.
        biased: whether convolution and projections have biases.
    """

    taps: int
    biased: bool


@dataclass(frozen=True, slots=True)
class Mamba2Layer:
    """A selective state space after a convolution (Mamba-2; Granite 4).

    Attributes:
        num_heads: number of heads, H.
        head_dim: dimensions of a head, P.
        num_groups: number of groups of heads with the same B and C.
        state_size: size of the state, N.
        taps: number of tokens that the convolution sees.
        conv_biased: whether the convolution has a bias.
        biased: whether the projections have biases.
        normed: whether the results have a norm; if not, they are only multiplied by the gate (Falcon H1).
        is_norm_first: whether the gate multiplies the norm's result, else the norm's input.
        norm_eps: epsilon of that norm; None for that of the model's norms.
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
    norm_eps: float | None = None

    @property
    def width(self) -> int:
        """Number of columns of the gate, and of x."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Number of columns of x, B and C, which are the convolution's input."""
        return self.width + 2 * self.num_groups * self.state_size


@dataclass(frozen=True, slots=True)
class MambaLayer:
    """A selective state space with a state for each channel, after a convolution (Mamba, Jamba).

    Attributes:
        width: number of channels, each with a state of its own; the gate has the same number.
        state_size: size of the state, N.
        taps: number of tokens that the convolution sees.
        step_rank: number of inputs of the projection that computes the steps.
        conv_biased: whether the convolution has a bias.
        biased: whether the projections of hidden states have biases.
        norms: whether B, C and the input of the projection to steps have RMS norms, with or without a weight.
        norm_eps: epsilon of these norms.
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
        """Number of channels: in the layout of Mamba-2's states, this layer has one head of that many dimensions."""
        return self.width

    @property
    def conv_width(self) -> int:
        """Number of columns of the convolution's input."""
        return self.width


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """A gated delta net after a convolution (Qwen3-Next, Qwen 3.5, OLMo Hybrid).

    Attributes:
        num_heads: number of value heads, H.
        head_dim: dimensions of a value head, P.
        num_key_heads: number of query heads, and of key heads.
        key_dim: dimensions of a query head and of a key head, N.
        taps: number of tokens that the convolution sees.
        grouped: whether the projections' columns are ordered by key head (Qwen3-Next).
        separate: whether q, k and v have a projection each (OLMo Hybrid).
        rate_factor: factor of the rates; with 2 a state may have negative eigenvalues.
        norm_eps: epsilon of the norm of the results; None for that of the model's norms.
    """

    num_heads: int
    head_dim: int
    num_key_heads: int
    key_dim: int
    taps: int
    grouped: bool
    separate: bool = False
    rate_factor: float = 1.0
    norm_eps: float | None = None

    @property
    def width(self) -> int:
        """Number of columns of values, and of the gate."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Number of columns of keys, and of queries."""
        return self.num_key_heads * self.key_dim

    @property
    def conv_width(self) -> int:
        """Number of columns of q, k and v, which are the convolution's input."""
        return 2 * self.key_width + self.width


@dataclass(frozen=True, slots=True)
class KimiDeltaLayer:
    """A gated delta net that multiplies each row of the state by a factor of its own (Kimi Linear, Ling 3).

    Attributes:
        num_heads: number of heads of queries, keys and values, H.
        head_dim: dimensions of each of these heads, P.
        taps: number of tokens that the convolution sees.
        narrow: whether steps and gate are each computed by two projections, over a narrow vector (Kimi Linear).
        lower_bound: the least logarithm of a factor, which is this times a sigmoid (Ling 3); None for a softplus.
    """

    num_heads: int
    head_dim: int
    taps: int
    narrow: bool = True
    lower_bound: float | None = None

    @property
    def state_size(self) -> int:
        """Number of rows of a head's state."""
        return self.head_dim

    @property
    def width(self) -> int:
        """Number of columns of queries, of keys, of values, of steps and of the gate."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Number of columns of q, k and v, which are the convolution's input."""
        return 3 * self.width


RecurrentLayer = ShortConvLayer | MambaLayer | Mamba2Layer | DeltaLayer | KimiDeltaLayer
