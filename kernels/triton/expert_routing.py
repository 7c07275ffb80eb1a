"""Triton kernels around the products of experts, one launch each: routing, activation with weights, and the sum.

A program of ``route`` has one token. It holds the scores of all experts in registers, and takes the largest score k
times. Among equal scores the first expert is taken, as by the native CPU kernels. No program reads results of another
program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layouts.expert_arguments import ClampedSwiglu, ExpertActivation, RouterParams, Routing
from .activation import tanh
from .launch import NARROW_TYPES, Launch, cdiv, is_narrow, is_of, meta, power_of_two

_MOST_EXPERTS, _MOST_PICKS = 1024, 32
_WIDE_ROUTER = 256  # number of experts beyond which a token has four warps instead of one
_BLOCK = 1024  # columns of a program of the sum and of the activation


@triton.jit
def _best_of(values, number, is_left):
    """Return the number of the largest remaining value; the first of equal values."""
    best = tl.max(tl.max(tl.where(is_left, values, float("-inf")), 1), 0)
    return tl.min(tl.min(tl.where(is_left & (values == best), number, 2147483647), 1), 0)


@triton.jit(do_not_specialize=["count", "of_group"])
def _route(
    logits, correction, factors, experts, weights, count, of_group, scale, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    TOP_K: tl.constexpr, PICKS: tl.constexpr, ROWS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr,
    SIGMOID: tl.constexpr, BY_LOGITS: tl.constexpr, CORRECTED: tl.constexpr, FACTORED: tl.constexpr,
    RENORMALISES: tl.constexpr,
):  # fmt: skip
    """Program t: experts [TOP_K] and weights [TOP_K] of token t, from its logits [count], ``of_group`` in each group.

    The tile is [ROWS, SIZE]: each row has the experts of one group. ``PICKS`` is TOP_K rounded up to a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, ROWS)[:, None]
    place = tl.arange(0, SIZE)[None, :]
    number = group * of_group + place
    inside = (place < of_group) & (number < count)
    x = tl.load(logits + token * count + number, inside, other=float("-inf"))
    if SIGMOID:
        scores = tl.where(inside, 1.0 / (1.0 + tl.exp(-x)), 0.0)
    else:
        largest = tl.max(tl.max(x, 1), 0)
        largest = tl.where(largest == float("-inf"), 0.0, largest)
        e = tl.where(inside, tl.exp(x - largest), 0.0)
        scores = e / tl.sum(tl.sum(e, 1), 0)
    choice = x if BY_LOGITS else scores
    if CORRECTED:
        choice += tl.load(correction + number, inside, other=0.0)
    # A NaN compares as false with everything, and would never be found.
    choice = tl.where(choice == choice, choice, float("-inf"))
    is_left = inside
    if TOP_GROUPS < GROUPS:
        of_groups = tl.zeros([ROWS], tl.float32)
        counted = choice
        remaining = inside
        for _best in tl.static_range(BEST):
            best = tl.max(tl.where(remaining, counted, float("-inf")), 1)
            of_groups += best
            first = tl.min(tl.where(remaining & (counted == best[:, None]), place, SIZE), 1)
            remaining = remaining & (place != first[:, None])
        of_groups = tl.where(of_groups == of_groups, of_groups, float("-inf"))
        row = tl.arange(0, ROWS)
        candidates = row < GROUPS
        allowed = row < 0
        for _group in tl.static_range(TOP_GROUPS):
            best = tl.max(tl.where(candidates, of_groups, float("-inf")), 0)
            index = tl.min(tl.where(candidates & (of_groups == best), row, ROWS), 0)
            allowed = allowed | (row == index)
            candidates = candidates & (row != index)
        is_left = inside & allowed[:, None]
    slot = tl.arange(0, PICKS)
    picked = tl.zeros([PICKS], tl.int32)
    chosen = tl.zeros([PICKS], tl.float32)
    for pick in range(TOP_K):
        taken = _best_of(choice, number, is_left)
        value = tl.sum(tl.sum(tl.where(number == taken, scores, 0.0), 1), 0)
        picked = tl.where(slot == pick, taken, picked)
        chosen = tl.where(slot == pick, value, chosen)
        is_left = is_left & (number != taken)
    is_pick = slot < TOP_K
    if RENORMALISES:
        chosen = chosen / (tl.sum(chosen, 0) + 1e-20)
    if FACTORED:
        chosen *= tl.load(factors + picked, is_pick, other=0.0)
    tl.store(experts + token * TOP_K + slot, picked, is_pick)
    tl.store(weights + token * TOP_K + slot, chosen * scale, is_pick)


@triton.jit(do_not_specialize=["picks"])
def _sum_experts(
    y, weights, shared, gate, out, picks, width, WEIGHTED: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, b): columns ``b * BLOCK ...`` of ``sum over p of weights[t, p] y[t, p] + sigmoid(gate[t]) shared``.

    y [T, picks, width], weights [T, picks], shared [T, width], gate [T].
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for pick in range(picks):
        value = tl.load(y + (token * picks + pick) * width + column, inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * picks + pick)
        total += value
    if SHARED:
        value = tl.load(shared + token * width + column, inside, other=0.0).to(tl.float32)
        if GATED:
            value *= 1.0 / (1.0 + tl.exp(-tl.load(gate + token)))
        total += value
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["alpha", "gate_limit", "limit", "offset"])
def _expert_activation(
    gate_up, weights, out, width, alpha, gate_limit, limit, offset,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (p, b): columns ``b * BLOCK ...`` of ``act(w gate) (w up)`` of pick p, whose weight is w."""
    pick = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + pick * 2 * width + column, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + pick * 2 * width + width + column, inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        weight = tl.load(weights + pick)
        gate *= weight
        up *= weight
    if KIND == "clamped":
        # These comparisons keep NaN.
        gate = tl.where(gate > gate_limit, gate_limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        active = gate / (1.0 + tl.exp(-alpha * gate)) * (up + offset)
    elif KIND == "silu":
        active = gate / (1.0 + tl.exp(-gate)) * up
    else:
        active = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up
    tl.store(out + pick * width + column, active.to(out.dtype.element_ty), inside)


def takes_router(logits: Tensor, params: RouterParams) -> bool:
    """Return whether the kernel routes these logits: fp32, at most 1,024 experts, of which a token has at most 32."""
    beside = tuple(each for each in (params.correction, params.factors) if each is not None)
    return (
        is_of(torch.float32, logits, *beside)
        and params.groups * _group_size(logits, params) <= _MOST_EXPERTS
        and params.top_k <= _MOST_PICKS
    )


def takes_sum(y: Tensor, weights: Tensor | None, shared: Tensor | None, gate: Tensor | None) -> bool:
    """Return whether the kernel adds these results: in a model's type, with weights and gates in fp32."""
    wide = tuple(each for each in (weights, gate) if each is not None)
    return is_narrow(y, *(() if shared is None else (shared,))) and is_of(torch.float32, *wide)


def takes_activation(gate_up: Tensor, weights: Tensor | None) -> bool:
    """Return whether the kernel computes the activation of these tensors."""
    return is_narrow(gate_up) and (weights is None or is_of(torch.float32, weights))


def route(logits: Tensor, params: RouterParams) -> Routing:
    """``kernels.expert_ops.route``: [T, E] -> experts and weights [T, k]."""
    shape = logits.shape[0], params.top_k
    routing = Routing(logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape))
    _route_launch(logits, params, routing).run()
    return routing


def sum_experts(y: Tensor, weights: Tensor | None, shared: Tensor | None, gate: Tensor | None) -> Tensor:
    """``kernels.expert_ops.sum_experts``: [T, k, H] or [T, H] -> [T, H]."""
    out = y.new_empty(y.shape[0], y.shape[-1])
    _sum_launch(y if y.dim() == 3 else y[:, None], weights, shared, gate, out).run()
    return out


def expert_activation(gate_up: Tensor, kind: ExpertActivation, weights: Tensor | None) -> Tensor:
    """``kernels.expert_ops.expert_activation``: [T, k, 2 * I] -> [T, k, I], or [T, 2 * I] -> [T, I]."""
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    _activation_launch(gate_up, kind, weights, out).run()
    return out


def _group_size(logits: Tensor, params: RouterParams) -> int:
    return power_of_two(cdiv(logits.shape[1], params.groups), 2)


def _route_launch(logits: Tensor, params: RouterParams, routing: Routing) -> Launch:
    tokens, count = logits.shape
    numbers = (count, cdiv(count, params.groups), float(params.scale))
    correction, factors = (logits if each is None else each for each in (params.correction, params.factors))
    constants: dict[str, Any] = {
        "GROUPS": params.groups,
        "SIZE": _group_size(logits, params),
        "TOP_K": params.top_k,
        "PICKS": power_of_two(params.top_k, 2),
        "ROWS": power_of_two(params.groups),
        "TOP_GROUPS": params.top_groups,
        "BEST": params.best_of_group,
        "SIGMOID": params.scores == "sigmoid",
        "BY_LOGITS": params.chooses_by_logits,
        "CORRECTED": params.correction is not None,
        "FACTORED": params.factors is not None,
        "RENORMALISES": params.renormalises,
    }
    warps = 4 if count > _WIDE_ROUTER else 1
    return Launch(_route, (tokens, 1, 1), (logits, correction, factors, *routing, *numbers), constants, warps)


def _sum_launch(y: Tensor, weights: Tensor | None, shared: Tensor | None, gate: Tensor | None, out: Tensor) -> Launch:
    tokens, picks, width = y.shape
    beside = (y if each is None else each for each in (weights, shared, gate))
    constants: dict[str, Any] = {
        "WEIGHTED": weights is not None,
        "SHARED": shared is not None,
        "GATED": shared is not None and gate is not None,
        "BLOCK": _BLOCK,
    }
    return Launch(_sum_experts, (tokens, cdiv(width, _BLOCK), 1), (y, *beside, out, picks, width), constants)


def _activation_launch(gate_up: Tensor, kind: ExpertActivation, weights: Tensor | None, out: Tensor) -> Launch:
    width = out.shape[-1]
    is_clamped = isinstance(kind, ClampedSwiglu)
    numbers = kind.numbers if isinstance(kind, ClampedSwiglu) else (0.0,) * 4
    constants = {"KIND": "clamped" if is_clamped else kind, "WEIGHTED": weights is not None, "BLOCK": _BLOCK}
    args = (gate_up, gate_up if weights is None else weights, out, width, *numbers)
    return Launch(_expert_activation, (out.numel() // width, cdiv(width, _BLOCK), 1), args, constants)


def _router_examples() -> Iterator[tuple[str, int, RouterParams]]:
    """Yield the routers of model families: Qwen 3, gpt-oss, DeepSeek V3, Llama 4 and Gemma 4."""
    meta_row = meta(256, dtype=torch.float32)
    yield "softmax-128", 128, RouterParams(8, renormalises=True)
    yield "softmax-32", 32, RouterParams(4, renormalises=True)
    yield "groups-256", 256, RouterParams(8, "sigmoid", True, 2.5, meta_row, None, 8, 4, 2)
    yield "sigmoid-16", 16, RouterParams(1, "sigmoid")
    yield "softmax-512", 512, RouterParams(10, renormalises=True)
    yield "factors-128", 128, RouterParams(8, renormalises=True, factors=meta_row)


def variants() -> Iterator[tuple[str, Launch]]:
    """Yield compilations of the ops: routers of families of models, and every sum and activation."""
    for name, count, params in _router_examples():
        shape = 2, params.top_k
        routing = Routing(meta(*shape, dtype=torch.int32), meta(*shape, dtype=torch.float32))
        yield f"expert_route/{name}", _route_launch(meta(2, count, dtype=torch.float32), params, routing)
    weights, gate = meta(2, 8, dtype=torch.float32), meta(2, 1, dtype=torch.float32)
    for name, dtype in NARROW_TYPES.items():
        y, out = meta(2, 8, 2048, dtype=dtype), meta(2, 2048, dtype=dtype)
        kinds = {"plain": (None, None, None), "weighted": (weights, None, None), "shared": (weights, out, None)}
        for kind, beside in {**kinds, "gated": (weights, out, gate)}.items():
            yield f"expert_sum/{name}-{kind}", _sum_launch(y, *beside, out)
        activations: tuple[ExpertActivation, ...] = ("silu", "gelu_tanh", ClampedSwiglu(1.7, 7.0))
        for act in activations:
            label = act if isinstance(act, str) else "clamped"
            for end, factors in (("", None), ("-weighted", weights)):
                launch = _activation_launch(y, act, factors, meta(2, 8, 1024, dtype=dtype))
                yield f"expert_activation/{name}-{label}{end}", launch
