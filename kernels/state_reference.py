"""The ops of ``kernels.state_ops`` in plain torch: the tests' oracle, and the path of devices without kernels.

Except in the scans, no shape depends on the contents of a tensor, so the ops can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .layouts.state_arguments import ConvParams, DeltaParams, GatedNormParams, SelectiveParams, SsmParams, StateBatch

_LENGTH_EPS = 1e-6


def causal_conv(x: Tensor, state: Tensor, batch: StateBatch, params: ConvParams, first: int = 0) -> Tensor:
    """See ``kernels.state_ops.causal_conv``."""
    taps, width = params.weight.shape
    columns = x[:, first : first + (3 if params.gated else 1) * width]
    gate, inputs = None, columns
    if params.gated:
        left, gate, right = columns.split(width, dim=1)
        inputs = left * right
    windows = _windows(inputs, state, batch, taps)
    out = (windows.float() * params.weight.float()).sum(1)
    if params.bias is not None:
        out += params.bias.float()
    out = functional.silu(out) if gate is None else out * gate.float()
    _save(windows[:, 1:], state, batch)
    return out.to(x.dtype)


def ssm_scan(x: Tensor, steps: Tensor, first: int, state: Tensor, batch: StateBatch, params: SsmParams) -> Tensor:
    """See ``kernels.state_ops.ssm_scan``."""
    heads, size = params.num_heads, params.num_groups * params.state_size
    wide, into, out_of = x.float().split((params.width, size, size), dim=1)
    wide = wide.view(-1, heads, params.head_dim)
    each = heads // params.num_groups
    into, out_of = (
        part.view(-1, params.num_groups, params.state_size).repeat_interleave(each, dim=1) for part in (into, out_of)
    )
    step = functional.softplus(steps[:, first : first + heads].float() + params.step_bias)
    decay = torch.exp(step * params.decay)
    results = wide * params.skip[:, None]
    starts, checkpoints = batch.query_start.tolist(), batch.checkpoints.tolist()
    for row, (source, target) in enumerate(zip(batch.source.tolist(), batch.target.tolist(), strict=True)):
        kept = state[source].clone() if source >= 0 else torch.zeros_like(state[0])
        for token in range(starts[row], starts[row + 1]):
            added = (step[token, :, None] * into[token])[:, :, None] * wide[token][:, None]
            kept = decay[token, :, None, None] * kept + added
            results[token] += (out_of[token][:, :, None] * kept).sum(1)
            if checkpoints[token] >= 0:
                state[checkpoints[token]] = kept
        if starts[row] < starts[row + 1]:
            state[target] = kept
    out: Tensor = results.flatten(1).to(x.dtype)
    return out


def selective_scan(
    x: Tensor, steps: Tensor, both: Tensor, state: Tensor, batch: StateBatch, params: SelectiveParams
) -> Tensor:
    """See ``kernels.state_ops.selective_scan``."""
    wide = x.float()
    into, out_of = both.float().split(params.state_size, dim=1)
    step = functional.softplus(steps.float() + params.step_bias)
    results = wide * params.skip
    starts, checkpoints = batch.query_start.tolist(), batch.checkpoints.tolist()
    for row, (source, target) in enumerate(zip(batch.source.tolist(), batch.target.tolist(), strict=True)):
        kept = state[source, 0].clone() if source >= 0 else torch.zeros_like(state[0, 0])
        for token in range(starts[row], starts[row + 1]):
            kept = torch.exp(step[token] * params.decay) * kept + into[token][:, None] * (step[token] * wide[token])
            results[token] += out_of[token] @ kept
            if checkpoints[token] >= 0:
                state[checkpoints[token], 0] = kept
        if starts[row] < starts[row + 1]:
            state[target, 0] = kept
    return results.to(x.dtype)


def delta_scan(
    x: Tensor, gates: Tensor, first: tuple[int, int], state: Tensor, batch: StateBatch, params: DeltaParams
) -> Tensor:
    """See ``kernels.state_ops.delta_scan``."""
    heads, of_keys = params.num_heads, params.num_key_heads * params.key_dim
    queries, keys, values = x.float().split((of_keys, of_keys, params.width), dim=1)
    each = heads // params.num_key_heads
    queries, keys = (
        unit_length(part.view(-1, params.num_key_heads, params.key_dim)).repeat_interleave(each, dim=1)
        for part in (queries, keys)
    )
    values = values.view(-1, heads, params.head_dim)
    steps, rates = (
        gates[:, column : column + count].float() for column, count in zip(first, (params.steps, heads), strict=True)
    )
    # [T, H, N]; or [T, H, 1] if all rows of a head's state have the same decay.
    steps, decay = (steps + params.step_bias).unflatten(1, (heads, -1)), params.decay[:, None]
    if params.lower_bound is None:
        shrink = torch.exp(functional.softplus(steps) * decay)
    else:
        shrink = torch.exp(params.lower_bound * torch.sigmoid(-decay * steps))
    rates, results = params.rate_factor * torch.sigmoid(rates), torch.zeros_like(values)
    starts, checkpoints = batch.query_start.tolist(), batch.checkpoints.tolist()
    for row, (source, target) in enumerate(zip(batch.source.tolist(), batch.target.tolist(), strict=True)):
        kept = state[source].clone() if source >= 0 else torch.zeros_like(state[0])
        for token in range(starts[row], starts[row + 1]):
            kept = shrink[token, :, :, None] * kept
            error = values[token] - (keys[token][:, :, None] * kept).sum(1)
            kept = kept + keys[token][:, :, None] * (rates[token, :, None] * error)[:, None]
            results[token] = (queries[token][:, :, None] * kept).sum(1) * params.key_dim**-0.5
            if checkpoints[token] >= 0:
                state[checkpoints[token]] = kept
        if starts[row] < starts[row + 1]:
            state[target] = kept
    out: Tensor = results.flatten(1).to(x.dtype)
    return out


def unit_length(x: Tensor) -> Tensor:
    """Return vectors along the last dimension, divided by their lengths."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)


def gated_norm(x: Tensor, gate: Tensor, params: GatedNormParams, first: int = 0) -> Tensor:
    """See ``kernels.state_ops.gated_norm``."""
    act = functional.silu if params.activation == "silu" else torch.sigmoid
    open_gate = act(gate[:, first : first + x.shape[1]].float())
    wide = x.float() if params.is_norm_first else x.float() * open_gate
    grouped = wide.view(len(x), params.num_groups, -1)
    normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + params.eps)
    result = normed.view_as(wide) * params.weight.float()
    return (result * open_gate if params.is_norm_first else result).to(x.dtype)


def row_of_token(batch: StateBatch) -> Tensor:
    """[T] int64, the row of each token; tokens after the last row get the last row."""
    tokens = torch.arange(len(batch.checkpoints), device=batch.query_start.device, dtype=torch.int32)
    rows: Tensor = torch.searchsorted(batch.query_start[1:].contiguous(), tokens, right=True)
    return rows.clamp_(max=len(batch.source) - 1)


def _windows(inputs: Tensor, state: Tensor, batch: StateBatch, taps: int) -> Tensor:
    """[T, taps, W]: each token's input and the inputs before it in its row, taken from the row's state if necessary."""
    tokens, device = len(inputs), inputs.device
    rows = row_of_token(batch)
    start = batch.query_start[rows].long()
    at = torch.arange(tokens, device=device)[:, None] + torch.arange(1 - taps, 1, device=device)
    before = state[batch.source.clamp(min=0).long()].masked_fill((batch.source < 0)[:, None, None], 0)
    # One tensor holds all rows' states, then the inputs.
    kept = before.flatten(0, 1)
    index = torch.where(at >= start[:, None], len(kept) + at, (rows * (taps - 1) + taps - 1 - start)[:, None] + at)
    return torch.cat((kept, inputs))[index.clamp_(min=0)]


def _save(after: Tensor, state: Tensor, batch: StateBatch) -> None:
    """Write the state after each token [T, ...] to its slot. Tokens without a slot write to the last slot."""
    nobody = len(state) - 1
    checkpoints = batch.checkpoints.long()
    state[torch.where(checkpoints < 0, nobody, checkpoints)] = after
    lengths = batch.query_start.diff()
    last = (batch.query_start[1:].long() - 1).clamp_(min=0)
    state[torch.where(lengths > 0, batch.target.long(), nobody)] = after[last]
