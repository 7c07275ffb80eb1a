"""Ops of layers with a recurrent state, on native kernels, Triton kernels or plain torch.

The state of a row is read from one slot of a pool and written to another one, or to the same. States after tokens in
the middle of a row may be saved too. GPU kernels read no value back, and rows without tokens change nothing, so that
calls can be captured in a CUDA graph. In plain torch, a convolution reads nothing back either; there such rows change
the pool's last slot, which belongs to no row.

On the native path a token's bits do not depend on other rows, on chunks or on threads. On a GPU they depend on chunks,
if a row has more than a few tokens.
"""

from __future__ import annotations

from torch import Tensor

from . import state_reference
from .backend import native_for, on_triton
from .layouts.state_arguments import (
    MOST_STATE,
    ConvParams,
    DeltaParams,
    GatedNormParams,
    SelectiveParams,
    SsmParams,
    StateBatch,
)

__all__ = [
    "MOST_STATE",
    "ConvParams",
    "DeltaParams",
    "GatedNormParams",
    "SelectiveParams",
    "SsmParams",
    "StateBatch",
    "causal_conv",
    "delta_scan",
    "gated_norm",
    "selective_scan",
    "ssm_scan",
]


def causal_conv(x: Tensor, state: Tensor, batch: StateBatch, params: ConvParams, first: int = 0) -> Tensor:
    """``act(bias + sum over taps j of weight[j] * u[t - taps + 1 + j])`` in fp32 for each channel of a row's inputs u.

    If gated, the columns from ``first`` on are B, C and x side by side; then ``u = B * x`` in the type of x, and the
    result is ``C * (bias + ...)``. Otherwise u is the W columns from ``first`` on, and ``act`` is SiLU.

    Args:
        x: [T, columns].
        state: [slots, taps - 1, W] in the type of x, the last inputs of each row, oldest first; written.
        batch: rows and slots.
        params: parameters of the layer.
        first: first of these columns.

    Returns:
        [T, W] in the type of x.

    Raises:
        IndexError: a slot or a row is outside of its tensor (native kernels).
    """
    if on_triton(x.device):
        from .triton import causal_conv as gpu_conv

        if gpu_conv.takes(x, state, batch, params):
            return gpu_conv.causal_conv(x, state, batch, params, first)
        return state_reference.causal_conv(x, state, batch, params, first)
    kernels = native_for(x, state, params.weight)
    if kernels is not None and kernels.states.takes_conv(params):
        return kernels.states.causal_conv(x, state, batch, params, first)
    return state_reference.causal_conv(x, state, batch, params, first)


def ssm_scan(x: Tensor, steps: Tensor, first: int, state: Tensor, batch: StateBatch, params: SsmParams) -> Tensor:
    """Selective scan of each head h of a row (Mamba-2, https://arxiv.org/abs/2405.21060), in fp32:

        step  = softplus(steps[t, h] + step_bias[h])
        S_t   = exp(step * decay[h]) * S_(t-1) + step * B_t x_t^T
        y_t   = C_t S_t + skip[h] * x_t

    In plain torch it goes token by token, which is slow, and reads slots back.

    Args:
        x: [T, H * P + 2 * G * N]: x of all heads, then B and then C of all groups.
        steps: [T, columns] of the type of x.
        first: the column of the first head's step.
        state: [slots, H, N, P] fp32; written.
        batch: rows and slots.
        params: parameters of the layer.

    Returns:
        [T, H * P] in the type of x.

    Raises:
        IndexError: a slot or a row lies outside its tensor (native kernels).
    """
    if on_triton(x.device):
        from .triton import ssm_scan as gpu_scan

        if gpu_scan.takes(x, steps, state, batch, params):
            return gpu_scan.ssm_scan(x, steps, first, state, batch, params)
    kernels = native_for(x, steps)
    if kernels is not None and kernels.states.takes_scan(params, state):
        return kernels.states.ssm_scan(x, steps, first, state, batch, params)
    return state_reference.ssm_scan(x, steps, first, state, batch, params)


def selective_scan(
    x: Tensor, steps: Tensor, both: Tensor, state: Tensor, batch: StateBatch, params: SelectiveParams
) -> Tensor:
    """Selective scan of each channel w of a row (Mamba, https://arxiv.org/abs/2312.00752), in fp32:

        step      = softplus(steps[t, w] + step_bias[w])
        S_t[n]    = exp(step * decay[n, w]) * S_(t-1)[n] + step * B_t[n] * x_t[w]
        y_t[w]    = sum over n of C_t[n] * S_t[n] + skip[w] * x_t[w]

    It goes token by token, which is slow in plain torch.

    Args:
        x: [T, W].
        steps: [T, W] of the type of x.
        both: [T, 2 * N] of the type of x, B and then C, the same for all channels.
        state: [slots, 1, N, W] fp32; written.
        batch: rows and slots.
        params: parameters of the layer.

    Returns:
        [T, W] in the type of x.

    Raises:
        IndexError: a slot or a row lies outside its tensor (native kernels).
    """
    if on_triton(x.device):
        from .triton import selective_scan as gpu_scan

        if gpu_scan.takes(x, steps, both, state, batch, params):
            return gpu_scan.selective_scan(x, steps, both, state, batch, params)
    kernels = native_for(x, steps, both)
    if kernels is not None and kernels.states.takes_selective(params, state):
        return kernels.states.selective_scan(x, steps, both, state, batch, params)
    return state_reference.selective_scan(x, steps, both, state, batch, params)


def delta_scan(
    x: Tensor, gates: Tensor, first: tuple[int, int], state: Tensor, batch: StateBatch, params: DeltaParams
) -> Tensor:
    """Gated delta rule of each head h of a row (https://arxiv.org/abs/2412.06464), in fp32, q and k of unit length:

        shrink = exp(softplus(steps[t, h] + step_bias[h]) * decay[h])
        S      = shrink * S_(t-1)
        S_t    = S + k_t (rate_factor * sigmoid(rates[t, h]) * (v_t - S^T k_t))^T
        y_t    = S_t^T q_t / sqrt(N)

    With ``params.by_channel`` (Kimi delta attention, https://arxiv.org/abs/2510.26692) each row n of a state has its
    own step ``steps[t, h * N + n]`` and decays by its own factor. With ``params.lower_bound`` that factor is
    ``exp(lower_bound * sigmoid(-decay[h] * (step + step_bias)))``.

    The native kernel also computes token by token: a dimension of a value depends on no other one, so the cells that a
    thread updates stay in its cache. A GPU computes long rows in the chunk form of the rule, in which a token's bits
    depend on where a chunk begins. If each row of a state has its own decay, a GPU computes token by token.

    Args:
        x: [T, 2 * G * N + H * P]: q and then k of all key heads, then v of all heads.
        gates: [T, columns] of the type of x.
        first: the columns of the first head's step and rate.
        state: [slots, H, N, P] fp32; written.
        batch: rows and slots.
        params: parameters of the layer.

    Returns:
        [T, H * P] in the type of x.

    Raises:
        IndexError: a slot or a row lies outside its tensor (native kernels).
    """
    if on_triton(x.device):
        from .triton import delta_scan as gpu_scan

        if gpu_scan.takes(x, gates, state, batch, params):
            return gpu_scan.delta_scan(x, gates, first, state, batch, params)
    kernels = native_for(x, gates)
    if kernels is not None and kernels.states.takes_delta(params, state):
        return kernels.states.delta_scan(x, gates, first, state, batch, params)
    return state_reference.delta_scan(x, gates, first, state, batch, params)


def gated_norm(x: Tensor, gate: Tensor, params: GatedNormParams, first: int = 0) -> Tensor:
    """``rms_norm(x * silu(gate)) * weight`` or ``rms_norm(x) * weight * silu(gate)`` of groups of columns, in fp32.

    The gate's function is ``params.activation``.

    Args:
        x: [T, W].
        gate: [T, columns]; the gate is the W columns from ``first`` on.
        params: parameters of the layer.
        first: first column of the gate.
    """
    if on_triton(x.device):
        from .triton import gated_norm as gpu_norm

        if gpu_norm.takes(x, gate, params):
            return gpu_norm.gated_norm(x, gate, params, first)
    kernels = native_for(x, gate, params.weight)
    if kernels is not None and kernels.states.takes_norm(params):
        return kernels.states.gated_norm(x, gate, params, first)
    return state_reference.gated_norm(x, gate, params, first)
