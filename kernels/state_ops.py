"""Ops of layers with a recurrent state, on native kernels or plain torch.

The state of a row is read from one slot of a pool and written to another, or the same; states after tokens in the
middle of a row may be saved on the way. On a CUDA device no call reads a value back, and rows without tokens change
nothing but the pool's last slot, which belongs to no row, so that calls can be captured in a CUDA graph.

On the native path a token's bits depend neither on other rows, nor on chunks, nor on threads.
"""

from __future__ import annotations

from torch import Tensor

from . import state_reference
from .backend import native_for, on_triton
from .layouts.state_arguments import ConvParams, SsmParams, StateBatch

__all__ = ["ConvParams", "SsmParams", "StateBatch", "causal_conv", "gated_norm", "ssm_scan"]


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
    kernels = None if on_triton(x.device) else native_for(x, state, params.weight)
    if kernels is not None and kernels.states.takes_conv(params):
        return kernels.states.causal_conv(x, state, batch, params, first)
    return state_reference.causal_conv(x, state, batch, params, first)


def ssm_scan(x: Tensor, steps: Tensor, first: int, state: Tensor, batch: StateBatch, params: SsmParams) -> Tensor:
    """Selective scan of each head h of a row (Mamba-2, https://arxiv.org/abs/2405.21060), in fp32:

        step  = softplus(steps[t, h] + step_bias[h])
        S_t   = exp(step * decay[h]) * S_(t-1) + step * B_t x_t^T
        y_t   = C_t S_t + skip[h] * x_t

    In plain torch it goes token by token, which is slow.

    Args:
        x: [T, H * P + 2 * G * N]: x of all heads, then B and then C of all groups.
        steps: [T, columns] of the type of x.
        first: the column of the first head's step.
        state: [slots, H, N, P] fp32; written.
        batch: rows and slots.
        params: of the layer.

    Returns:
        [T, H * P] in the type of x.

    Raises:
        IndexError: a slot or a row lies outside its tensor (native kernels).
    """
    kernels = native_for(x, steps)
    if kernels is not None and kernels.states.takes_scan(params, state):
        return kernels.states.ssm_scan(x, steps, first, state, batch, params)
    return state_reference.ssm_scan(x, steps, first, state, batch, params)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
    """``rms_norm(x * silu(gate))`` of each group of adjacent columns, times the weight, in fp32.

    Args:
        x: [T, W].
        gate: [T, at least W], of which the first W columns count.
        weight: [W].
    """
    kernels = native_for(x, gate, weight)
    if kernels is not None and kernels.states.takes_norm(weight, num_groups):
        return kernels.states.gated_norm(x, gate, weight, eps, num_groups)
    return state_reference.gated_norm(x, gate, weight, eps, num_groups)
