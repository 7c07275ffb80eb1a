"""Convolutions with a state: against torch's own, in any division into steps, with checkpoints on the way."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from rootgraft.kernels import state_ops, state_reference
from rootgraft.kernels.ops import native_kernels, set_threads
from rootgraft.kernels.state_ops import ConvParams, DeltaParams, GatedNormParams, SelectiveParams, SsmParams, StateBatch

# A whole number of the vectors that torch takes together, as in every model: it computes silu of the others one by one,
# with other last bits.
WIDTH, SLOTS = 64, 12
PATHS = [
    pytest.param(state_ops.causal_conv, marks=pytest.mark.skipif(native_kernels() is None, reason="no C++ compiler")),
    state_reference.causal_conv,
]


def batch(lengths: list[int], source: list[int], target: list[int], checkpoints: dict[int, int] | None = None):
    total = sum(lengths)
    saved = [(checkpoints or {}).get(token, -1) for token in range(total)]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return StateBatch(*(torch.tensor(each, dtype=torch.int32) for each in (starts, source, target, saved)))


def make(taps: int, *, gated: bool, biased: bool = False, dtype: torch.dtype = torch.float32) -> ConvParams:
    generator = torch.Generator().manual_seed(taps)
    weight = torch.randn(taps, WIDTH, generator=generator).to(dtype)
    return ConvParams(weight, torch.randn(WIDTH, generator=generator).to(dtype) if biased else None, gated)


def inputs(tokens: int, *, gated: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, 3 * WIDTH if gated else WIDTH, generator=torch.Generator().manual_seed(9)).to(dtype)


def oracle(x: Tensor, params: ConvParams) -> Tensor:
    """One sequence from its beginning, by torch's convolution."""
    left, gate, right = x.split(WIDTH, dim=1) if params.gated else (torch.ones_like(x), None, x)
    taps = len(params.weight)
    padded = functional.pad((left * right).T[None].float(), (taps - 1, 0))
    out = functional.conv1d(
        padded, params.weight.T[:, None].float(), params.bias if params.bias is None else params.bias.float(),
        groups=WIDTH,
    )[0].T  # fmt: skip
    return functional.silu(out) if gate is None else out * gate.float()


def state_of(params: ConvParams, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((SLOTS, len(params.weight) - 1, WIDTH), 77.0, dtype=dtype)


@pytest.mark.parametrize("conv", PATHS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("taps", "biased"), [(2, False), (3, True), (4, False)])
def test_rows_of_any_length(conv, gated: bool, taps: int, biased: bool) -> None:
    params, lengths = make(taps, gated=gated, biased=biased), [7, 1, 0, 2, 3]
    x = inputs(sum(lengths), gated=gated)
    found = conv(x, state_of(params), batch(lengths, [-1] * 5, [0, 1, 2, 3, 4]), params)
    for ours, rows in zip(found.split(lengths), x.split(lengths), strict=True):
        assert len(ours) == len(rows)
        if len(rows):
            torch.testing.assert_close(ours, oracle(rows, params), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("conv", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [True, False])
def test_chunks_are_bitwise_the_same(conv, dtype: torch.dtype, gated: bool) -> None:
    params = make(4, gated=gated, dtype=dtype)
    x = inputs(20, gated=gated, dtype=dtype)
    whole = conv(x, state_of(params, dtype), batch([20], [-1], [0]), params)
    state, parts, done = state_of(params, dtype), [], 0
    for length in (1, 1, 5, 2, 11):
        parts.append(conv(x[done : done + length], state, batch([length], [0 if done else -1], [0]), params))
        done += length
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("conv", PATHS)
def test_a_row_goes_on_from_any_checkpoint(conv) -> None:
    """In another slot, beside rows without tokens; what no row names stays as it was."""
    params, x = make(4, gated=True), inputs(11, gated=True)
    state = state_of(params)
    saved = batch([11], [-1], [0], {0: 5, 1: 6, 7: 7, 10: 8})
    whole = conv(x, state, saved, params)
    assert (state[1:5] == 77).all() and (state[9:-1] == 77).all()
    for token, slot in {0: 5, 1: 6, 7: 7}.items():
        kept = state[slot].clone()
        rest = conv(x[token + 1 :], state, batch([0, 10 - token], [3, slot], [3, 2]), params)
        assert torch.equal(rest, whole[token + 1 :])
        assert torch.equal(state[slot], kept)
        assert torch.equal(state[2], state[0])
    assert torch.equal(state[8], state[0])
    assert (state[3] == 77).all()


@pytest.mark.parametrize("conv", PATHS)
def test_a_row_without_a_state_reads_none(conv) -> None:
    """Also where that of another row is not a number."""
    params, x, state = make(3, gated=True), inputs(4, gated=True), state_of(make(3, gated=True))
    state[:] = torch.nan
    assert torch.equal(
        conv(x, state, batch([4], [-1], [1]), params), conv(x, state_of(params), batch([4], [-1], [1]), params)
    )


@pytest.mark.parametrize("conv", PATHS)
def test_columns_beside_others(conv) -> None:
    params, x = make(3, gated=False), inputs(6, gated=False)
    wide = torch.cat((torch.full((6, 16), 9.0), x, torch.full((6, 5), 9.0)), dim=1)
    for state in (state_of(params), state_of(params)):
        found = conv(wide, state, batch([6], [-1], [0]), params, 16)
        torch.testing.assert_close(found, oracle(x, params), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(native_kernels() is None, reason="no C++ compiler")
def test_threads_change_no_bit() -> None:
    params = make(3, gated=True, dtype=torch.bfloat16)
    lengths = [300, 1, 0, 500, 2]
    x = inputs(sum(lengths), gated=True, dtype=torch.bfloat16)
    found = []
    for threads in (1, 3):
        set_threads(threads)
        state = state_of(params, torch.bfloat16)
        out = state_ops.causal_conv(x, state, batch(lengths, [-1] * 5, [0, 1, 2, 3, 4], {299: 7}), params)
        found.append((out, state))
    set_threads(torch.get_num_threads())
    assert all(torch.equal(one, three) for one, three in zip(*found, strict=True))


@pytest.mark.skipif(native_kernels() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "wrong",
    [
        batch([2], [SLOTS], [0]),
        batch([2], [-2], [0]),
        batch([2], [0], [SLOTS]),
        batch([2], [0], [-1]),
        batch([2], [0], [0], {1: SLOTS}),
        batch([3], [0], [0], {}),
    ],
)
def test_slots_outside_the_pool_are_refused(wrong: StateBatch) -> None:
    params, state = make(3, gated=True), None
    state = state_of(params)
    wrong = StateBatch(wrong.query_start, wrong.source, wrong.target, wrong.checkpoints[:2])
    with pytest.raises(IndexError, match="out of range"):
        state_ops.causal_conv(inputs(2, gated=True), state, wrong, params)
    assert (state == 77).all()


@pytest.mark.skipif(native_kernels() is None, reason="no C++ compiler")
def test_index_tensors_of_another_type_are_refused() -> None:
    good = batch([2], [0], [0])
    wrong = StateBatch(good.query_start, good.source.long(), good.target, good.checkpoints)
    params = make(3, gated=True)
    with pytest.raises(ValueError, match="int32"):
        state_ops.causal_conv(inputs(2, gated=True), state_of(params), wrong, params)
    with pytest.raises(ValueError, match="do not fit"):
        state_ops.causal_conv(inputs(2, gated=False), state_of(params), good, params)


HEADS, HEAD_DIM, GROUPS, STATE = 4, 16, 2, 24
SCANS = [
    pytest.param(state_ops.ssm_scan, marks=pytest.mark.skipif(native_kernels() is None, reason="no C++ compiler")),
    state_reference.ssm_scan,
]


def ssm_params() -> SsmParams:
    generator = torch.Generator().manual_seed(2)
    decay, bias, skip = torch.rand(3, HEADS, generator=generator)
    return SsmParams(HEADS, HEAD_DIM, GROUPS, STATE, -decay, bias, skip)


def ssm_inputs(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, ssm_params().columns, generator=generator)
    return x.to(dtype), torch.randn(tokens, 7 + HEADS, generator=generator).to(dtype)


def ssm_state() -> Tensor:
    return torch.full((SLOTS, HEADS, STATE, HEAD_DIM), 77.0)


def test_the_scan_is_the_sum_that_the_paper_writes() -> None:
    """As attention with a decay in place of the softmax: ``y_t = sum over s <= t of decay(s, t) (C_t . B_s) x_s``."""
    params, (x, steps) = ssm_params(), ssm_inputs(9)
    step = functional.softplus(steps[:, 7:].double() + params.step_bias)
    total = (step * params.decay).cumsum(0)
    wide, into, out_of = x.double().split((HEADS * HEAD_DIM, GROUPS * STATE, GROUPS * STATE), dim=1)
    wide = wide.view(9, HEADS, HEAD_DIM)
    into, out_of = (each.view(9, GROUPS, STATE).repeat_interleave(HEADS // GROUPS, 1) for each in (into, out_of))
    scores = torch.einsum("thn,shn->tsh", out_of, into) * torch.exp(total[:, None] - total[None]) * step[None]
    scores = scores * torch.ones(9, 9, dtype=torch.float64).tril()[:, :, None]
    expected = torch.einsum("tsh,shp->thp", scores, wide) + params.skip[:, None] * wide
    for scan in (state_ops.ssm_scan, state_reference.ssm_scan):
        found = scan(x, steps, 7, ssm_state(), batch([9], [-1], [0]), params)
        torch.testing.assert_close(found.double(), expected.flatten(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scan_in_chunks_and_from_checkpoints_is_the_same(scan, dtype: torch.dtype) -> None:
    """In every bit on native kernels."""
    tolerance = 0.0 if scan is state_ops.ssm_scan else 1e-5
    same = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    params, (x, steps), state = ssm_params(), ssm_inputs(20, dtype), ssm_state()
    whole = scan(x, steps, 7, state, batch([0, 20], [3, -1], [4, 0], {4: 6, 12: 7}), params)
    assert (state[1:6] == 77).all() and (state[8:-1] == 77).all()
    for token, slot in {4: 6, 12: 7}.items():
        rest = scan(x[token + 1 :], steps[token + 1 :], 7, state, batch([19 - token], [slot], [2]), params)
        same(rest, whole[token + 1 :])
        same(state[2], state[0])
    parts, done, other = [], 0, ssm_state()
    for length in (1, 1, 5, 13):
        part = slice(done, done + length)
        parts.append(scan(x[part], steps[part], 7, other, batch([length], [0 if done else -1], [0]), params))
        done += length
    same(torch.cat(parts), whole)


CHANNELS = 48
SELECTIVE = [
    pytest.param(
        state_ops.selective_scan, marks=pytest.mark.skipif(native_kernels() is None, reason="no C++ compiler")
    ),
    state_reference.selective_scan,
]


def selective_params() -> SelectiveParams:
    generator = torch.Generator().manual_seed(2)
    decay, bias, skip = (
        torch.rand(*shape, generator=generator) for shape in ((STATE, CHANNELS), (CHANNELS,), (CHANNELS,))
    )
    return SelectiveParams(-2 * decay, bias - 0.5, skip)


def selective_inputs(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (CHANNELS, CHANNELS, 2 * STATE)
    x, steps, both = (torch.randn(tokens, size, generator=generator).to(dtype) for size in sizes)
    return x, steps, both


def selective_state() -> Tensor:
    return torch.full((SLOTS, 1, STATE, CHANNELS), 77.0)


def test_the_selective_scan_is_the_sum_that_the_paper_writes() -> None:
    """``y_t = sum over s <= t and n of C_t[n] exp(sum of steps behind s * decay[n]) step_s B_s[n] x_s``."""
    params, (x, steps, both) = selective_params(), selective_inputs(9)
    step = functional.softplus(steps.double() + params.step_bias)
    into, out_of = both.double().split(STATE, dim=1)
    total = step.cumsum(0)
    between = torch.exp((total[:, None] - total[None])[:, :, None] * params.decay.double())  # [t, s, N, W]
    scores = torch.einsum("tn,sn,tsnw->tsw", out_of, into, between) * torch.ones(9, 9).tril().double()[:, :, None]
    expected = torch.einsum("tsw,sw->tw", scores, step * x) + params.skip * x
    for scan in (state_ops.selective_scan, state_reference.selective_scan):
        found = scan(x, steps, both, selective_state(), batch([9], [-1], [0]), params)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scan", SELECTIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_selective_scan_in_chunks_and_from_checkpoints_is_the_same(scan, dtype: torch.dtype) -> None:
    """In every bit on native kernels."""
    tolerance = 0.0 if scan is state_ops.selective_scan else 1e-5
    same = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    params, given, state = selective_params(), selective_inputs(20, dtype), selective_state()
    whole = scan(*given, state, batch([0, 20], [3, -1], [4, 0], {4: 6, 12: 7}), params)
    assert (state[1:6] == 77).all() and (state[8:-1] == 77).all()
    for token, slot in {4: 6, 12: 7}.items():
        behind = [each[token + 1 :] for each in given]
        same(scan(*behind, state, batch([19 - token], [slot], [2]), params), whole[token + 1 :])
        same(state[2], state[0])
    parts, done, other = [], 0, selective_state()
    for length in (1, 1, 5, 13):
        part = [each[done : done + length] for each in given]
        parts.append(scan(*part, other, batch([length], [0 if done else -1], [0]), params))
        done += length
    same(torch.cat(parts), whole)


@pytest.mark.skipif(native_kernels() is None, reason="no C++ compiler")
def test_a_selective_scan_refuses_what_does_not_fit() -> None:
    params, (x, steps, both) = selective_params(), selective_inputs(2)
    with pytest.raises(IndexError, match="out of range"):
        state_ops.selective_scan(x, steps, both, selective_state(), batch([2], [SLOTS], [0]), params)
    with pytest.raises(ValueError, match="do not fit"):
        state_ops.selective_scan(x, steps, both[:, :-1].contiguous(), selective_state(), batch([2], [0], [0]), params)


@pytest.mark.skipif(native_kernels() is None, reason="no C++ compiler")
def test_a_scan_refuses_what_does_not_fit() -> None:
    params, (x, steps) = ssm_params(), ssm_inputs(2)
    with pytest.raises(IndexError, match="out of range"):
        state_ops.ssm_scan(x, steps, 7, ssm_state(), batch([2], [SLOTS], [0]), params)
    with pytest.raises(ValueError, match="do not fit"):
        state_ops.ssm_scan(x, steps, 8, ssm_state(), batch([2], [0], [0]), params)
    with pytest.raises(ValueError, match="do not fit"):
        state_ops.gated_norm(x, x[:1], GatedNormParams(torch.ones(x.shape[1]), 1e-5, 1))


@pytest.mark.parametrize("kind", ["silu", "sigmoid"])
@pytest.mark.parametrize("is_norm_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_and_its_gate(dtype: torch.dtype, is_norm_first: bool, kind) -> None:
    generator = torch.Generator().manual_seed(5)
    x, gate, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 64), (5, 70), (64,)))
    factor = (functional.silu if kind == "silu" else torch.sigmoid)(gate[:, 6:].double())
    grouped = (x.double() if is_norm_first else x.double() * factor).view(5, 2, 32)
    expected = (grouped / (grouped.square().mean(-1, keepdim=True) + 1e-3).sqrt()).flatten(1) * weight.double()
    if is_norm_first:
        expected *= factor
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    params = GatedNormParams(weight, 1e-3, 2, is_norm_first, kind)
    for norm in (state_ops.gated_norm, state_reference.gated_norm):
        torch.testing.assert_close(norm(x, gate, params, 6).double(), expected, rtol=tolerance, atol=tolerance)


DELTAS = [
    pytest.param(state_ops.delta_scan, marks=pytest.mark.skipif(native_kernels() is None, reason="no C++ compiler")),
    state_reference.delta_scan,
]


def delta_params(
    head_dim: int, key_dim: int, *, by_channel: bool = False, factor: float = 1.0, bound: float | None = None
) -> DeltaParams:
    generator = torch.Generator().manual_seed(2)
    decay, bias = torch.rand(2, HEADS, generator=generator)
    if by_channel:
        bias = torch.rand(HEADS * key_dim, generator=generator)
    return DeltaParams(HEADS, head_dim, 2, key_dim, -decay, bias, by_channel, factor, bound)


def delta_inputs(params: DeltaParams, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, params.columns, generator=generator)
    return x.to(dtype), torch.randn(tokens, 3 + params.steps + HEADS, generator=generator).to(dtype)


def delta_state(params: DeltaParams) -> Tensor:
    return torch.full((SLOTS, HEADS, params.key_dim, params.head_dim), 77.0)


@pytest.mark.parametrize("scan", DELTAS)
@pytest.mark.parametrize(
    ("head_dim", "key_dim", "tokens", "factor"), [(16, 16, 5, 1.0), (32, 48, 70, 2.0), (48, 32, 130, 1.0)]
)
def test_the_delta_rule_is_that_of_transformers(scan, head_dim: int, key_dim: int, tokens: int, factor: float) -> None:
    """In its chunk form, which solves for all tokens of a chunk at once."""
    params = delta_params(head_dim, key_dim, factor=factor)
    x, gates = delta_inputs(params, tokens)
    found = scan(x, gates, (3, 3 + HEADS), delta_state(params), batch([tokens], [-1], [0]), params)
    queries, keys, values = x.split((2 * key_dim, 2 * key_dim, HEADS * head_dim), dim=1)
    theirs, _ = torch_chunk_gated_delta_rule(
        queries.view(1, tokens, 2, key_dim),
        keys.view(1, tokens, 2, key_dim),
        values.view(1, tokens, HEADS, head_dim),
        g=(params.decay * functional.softplus(gates[:, 3 : 3 + HEADS] + params.step_bias))[None],
        beta=factor * gates[:, 3 + HEADS :].sigmoid()[None],
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(found, theirs[0].flatten(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scan", DELTAS)
@pytest.mark.parametrize(
    ("head_dim", "key_dim", "tokens", "bound"), [(16, 16, 5, None), (32, 48, 70, None), (32, 16, 70, -5.0)]
)
def test_a_delta_rule_of_channels_is_that_of_transformers(
    scan, head_dim: int, key_dim: int, tokens: int, bound: float | None
) -> None:
    params = delta_params(head_dim, key_dim, by_channel=True, bound=bound)
    x, gates = delta_inputs(params, tokens)
    gates[:, 5] = torch.linspace(-30, 30, tokens)  # steps from next to none to those that forget all
    found = scan(x, gates, (3, 3 + params.steps), delta_state(params), batch([tokens], [-1], [0]), params)
    queries, keys, values = x.split((2 * key_dim, 2 * key_dim, HEADS * head_dim), dim=1)
    each, steps = HEADS // 2, (gates[:, 3 : 3 + params.steps] + params.step_bias).view(1, tokens, HEADS, key_dim)
    logs = params.decay[:, None] * functional.softplus(steps)
    if bound is not None:
        logs = bound * torch.sigmoid(-params.decay[:, None] * steps)
    theirs, _ = chunk_kimi_delta_attention(
        queries.view(1, tokens, 2, key_dim).repeat_interleave(each, dim=2),
        keys.view(1, tokens, 2, key_dim).repeat_interleave(each, dim=2),
        values.view(1, tokens, HEADS, head_dim),
        g=logs,
        beta=gates[:, 3 + params.steps :].sigmoid()[None],
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(found, theirs[0].flatten(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scan", DELTAS)
@pytest.mark.parametrize(("head_dim", "by_channel"), [(16, False), (32, False), (32, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_delta_scan_in_chunks_and_from_checkpoints_is_the_same(
    scan, dtype: torch.dtype, head_dim: int, by_channel: bool
) -> None:
    """In every bit on native kernels."""
    tolerance = 0.0 if scan is state_ops.delta_scan else 1e-5
    same = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    params = delta_params(head_dim, 32, by_channel=by_channel)
    (x, gates), state, where = delta_inputs(params, 20, dtype), delta_state(params), (3 + HEADS, 3)
    whole = scan(x, gates, where, state, batch([0, 20], [3, -1], [4, 0], {4: 6, 12: 7}), params)
    assert (state[1:6] == 77).all() and (state[8:-1] == 77).all()
    for token, slot in {4: 6, 12: 7}.items():
        rest = scan(x[token + 1 :], gates[token + 1 :], where, state, batch([19 - token], [slot], [2]), params)
        same(rest, whole[token + 1 :])
        same(state[2], state[0])
    parts, done, other = [], 0, delta_state(params)
    for length in (1, 1, 5, 13):
        part = slice(done, done + length)
        parts.append(scan(x[part], gates[part], where, other, batch([length], [0 if done else -1], [0]), params))
        done += length
    same(torch.cat(parts), whole)


@pytest.mark.skipif(native_kernels() is None, reason="no C++ compiler")
def test_a_delta_scan_refuses_what_does_not_fit() -> None:
    params = delta_params(16, 16)
    x, gates = delta_inputs(params, 2)
    with pytest.raises(IndexError, match="out of range"):
        state_ops.delta_scan(x, gates, (0, 4), delta_state(params), batch([2], [SLOTS], [0]), params)
    with pytest.raises(ValueError, match="do not fit"):
        state_ops.delta_scan(x, gates, (0, 8), delta_state(params), batch([2], [0], [0]), params)
