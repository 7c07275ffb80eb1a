"""Ops of layers with a recurrent state, on native kernels or plain torch.

The state of a row is read from one slot of a pool and written to another, or the same; states after tokens in the
middle of a row may be saved on the way. On a CUDA device no call reads a value back, and rows without tokens change
nothing but the pool's last slot, which belongs to no row, so that calls can be captured in a CUDA graph.

On the native path a token's bits depend neither on other rows, nor on chunks, nor on threads.
"""

from __future__ import annotations

from torch import Tensor

from . import state_reference
from .backend import native_for
from .layouts.state_arguments import ConvParams, StateBatch

__all__ = ["ConvParams", "StateBatch", "causal_conv"]


def causal_conv(x: Tensor, state: Tensor, batch: StateBatch, params: ConvParams, first: int = 0) -> Tensor:
    """``act(bias + sum over taps j of weight[j] * u[t - taps + 1 + j])`` in fp32 for each channel of a row's inputs u.

    Gated, with B, C and x side by side in the columns from ``first`` on, ``u = B * x`` in the type of x, and the result
    is ``C * (bias + ...)``. Otherwise u are the W columns from ``first`` on, and ``act`` is SiLU.

    Args:
        x: [T, columns].
        state: [slots, taps - 1, W] in the type of x, the last inputs of each row, oldest first; written.
        batch: rows and slots.
        params: of the layer.
        first: column.

    Returns:
        [T, W] in the type of x.

    Raises:
        IndexError: a slot or a row lies outside its tensor (native kernels).
    """
    kernels = native_for(x, state, params.weight)
    if kernels is not None and kernels.states.takes_conv(params):
        return kernels.states.causal_conv(x, state, batch, params, first)
    return state_reference.causal_conv(x, state, batch, params, first)
