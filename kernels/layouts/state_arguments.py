"""Argument records of ops with a recurrent state: per step, for all layers, and per convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from torch import Tensor

Gate = Literal["silu", "sigmoid"]
"""The function of a gate."""

MOST_STATE: Final = 256
"""Rows of a head's state, N, that kernels of a GPU keep in registers."""


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The slots from which the rows of a ragged batch read their states, and to which they write them.

    Slots belong to a pool [slots, ...]. If a row reads a slot, no other row of the batch writes it.

    Attributes:
        query_start: [R + 1] int32, row r owns tokens ``query_start[r]:query_start[r + 1]``.
        source: [R] int32, slot of the state before the row's first token, -1 for zeros.
        target: [R] int32, slot for the state after the row's last token; it may be the source.
        checkpoints: [T] int32, a further slot for the state after this token, -1 for none.
        max_query: upper bound of the number of tokens of a row; None if none is known.
    """

    query_start: Tensor
    source: Tensor
    target: Tensor
    checkpoints: Tensor
    max_query: int | None = None


@dataclass(frozen=True, slots=True)
class SsmParams:
    """A selective state space (Mamba-2): H heads of P dimensions, each with a state of N x P.

    Attributes:
        num_heads: H.
        head_dim: P.
        num_groups: number of groups of adjacent heads; the heads of a group have the same B and C.
        state_size: N.
        decay: [H] fp32, below 0: a state shrinks by ``exp(step * decay)`` with each token.
        step_bias: [H] fp32, added to a head's step before the softplus.
        skip: [H] fp32, factor of the input that is added to the output.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    decay: Tensor
    step_bias: Tensor
    skip: Tensor

    @property
    def width(self) -> int:
        """H * P."""
        return self.num_heads * self.head_dim

    @property
    def columns(self) -> int:
        """Columns of x, B and C."""
        return self.width + 2 * self.num_groups * self.state_size


@dataclass(frozen=True, slots=True)
class SelectiveParams:
    """A selective state space (Mamba): each of W channels has a step, and N numbers of state, each with its own decay.

    Attributes:
        decay: [N, W] fp32, below 0: a number shrinks by ``exp(step * decay)`` with each token.
        step_bias: [W] fp32, added to a channel's step before the softplus.
        skip: [W] fp32, factor of the input that is added to the output.
    """

    decay: Tensor
    step_bias: Tensor
    skip: Tensor

    @property
    def state_size(self) -> int:
        """N."""
        return self.decay.shape[0]

    @property
    def width(self) -> int:
        """W."""
        return self.decay.shape[1]


@dataclass(frozen=True, slots=True)
class DeltaParams:
    """A gated delta rule: H heads of P dimensions, each with a state of N x P; adjacent heads share q and k.

    Attributes:
        num_heads: H, number of heads of values.
        head_dim: P, dimensions of a value.
        num_key_heads: number of heads of queries and keys, a divisor of H.
        key_dim: N, dimensions of a query and of a key.
        decay: [H] fp32, below 0: a state shrinks by ``exp(step * decay)`` with each token.
        step_bias: [H] fp32, added to a head's step before the softplus; [H * N] with ``by_channel``.
        by_channel: whether each of the N rows of a state has its own step (Kimi Linear); otherwise each head has one.
        rate_factor: factor of the sigmoid of the rates; 2 if a state may have negative eigenvalues (OLMo Hybrid).
        lower_bound: with ``by_channel`` a number below 0: a row shrinks by ``exp(lower_bound * sigmoid(-decay * (step +
            step_bias)))`` instead (Ling 3); None for the rule with the softplus.
    """

    num_heads: int
    head_dim: int
    num_key_heads: int
    key_dim: int
    decay: Tensor
    step_bias: Tensor
    by_channel: bool = False
    rate_factor: float = 1.0
    lower_bound: float | None = None

    def __post_init__(self) -> None:
        if self.lower_bound is not None and not (self.by_channel and self.lower_bound < 0):
            raise ValueError(f"a lower bound must be below 0, and of rows with steps of their own: {self.lower_bound}")

    @property
    def steps(self) -> int:
        """Columns of steps."""
        return self.num_heads * (self.key_dim if self.by_channel else 1)

    @property
    def width(self) -> int:
        """H * P."""
        return self.num_heads * self.head_dim

    @property
    def columns(self) -> int:
        """Columns of q, k and v."""
        return 2 * self.num_key_heads * self.key_dim + self.width


@dataclass(frozen=True, slots=True)
class GatedNormParams:
    """An RMS norm of each group of adjacent columns, and a gate.

    Attributes:
        weight: [W].
        eps: epsilon of the norm.
        num_groups: a divisor of W.
        is_norm_first: whether the gate multiplies the result of the norm, not its input.
        activation: activation function of the gate.
    """

    weight: Tensor
    eps: float
    num_groups: int
    is_norm_first: bool = False
    activation: Gate = "silu"


@dataclass(frozen=True, slots=True)
class ConvParams:
    """A causal convolution of each channel with the inputs before it.

    Attributes:
        weight: [taps, W], the tap of the newest input last.
        bias: [W] or None.
        gated: whether the input is a product of two projections and the result is multiplied by a third one (LFM2).
            Otherwise SiLU is applied to the result.
    """

    weight: Tensor
    bias: Tensor | None
    gated: bool
