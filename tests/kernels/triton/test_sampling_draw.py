"""The GPU's sampling kernels, interpreted, against the definitions in torch: bit for bit."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.gpu.measure import launches
from rootgraft.engine.sampling import top_k_top_p
from rootgraft.kernels import ops, sampling_ops
from rootgraft.kernels.layouts.draw_params import DrawParams
from rootgraft.kernels.triton import sampling_draw

pytestmark = pytest.mark.usefixtures("interpreted")


def columns(
    temperature: list[float], top_k: list[int], top_p: list[float], min_p: list[float], u: list[float]
) -> DrawParams:
    kinds = (torch.float32, torch.int64, torch.float64, torch.float32, torch.float64)
    values = (temperature, top_k, top_p, min_p, u)
    return DrawParams(*(torch.tensor(each, dtype=kind)[:, None] for each, kind in zip(values, kinds, strict=True)))


def drawn(logits: torch.Tensor, draws: DrawParams) -> tuple[list[int], list[int]]:
    """Tokens by the kernels and by the definition."""
    logits = top_k_top_p.pad(logits)
    best = logits.amax(1, keepdim=True)
    by_kernel = top_k_top_p.draw_kept(logits, best, draws).tolist()
    with mock.patch.object(top_k_top_p, "has_kernel", return_value=False):
        return by_kernel, top_k_top_p.draw_kept(logits, best, draws).tolist()


params = st.tuples(
    st.sampled_from([1e-6, 0.3, 1.0, 1.75]),
    st.sampled_from([0, 1, 2, 7, 50, 1000]),
    st.sampled_from([1.0, 1e-9, 0.0, 0.5, 0.9, 0.999999]) | st.floats(0.01, 1.0),
    st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    st.floats(0, 1, exclude_max=True),
)


@settings(max_examples=15)
@example([(1.0, 0, 0.0, 0.0, 0.0), (1e-6, 0, 0.0, 0.0, 0.5)], 64, 2, 1)  # several likeliest, top_p 0
@given(
    rows=st.lists(params, min_size=1, max_size=2),
    vocab=st.sampled_from([3, 64, 200, 1300]),
    spread=st.sampled_from([0, 2, 8, 40]),
    seed=st.integers(0, 1 << 32),
)
def test_the_same_token_as_by_sorting(rows, vocab, spread, seed):
    """Logits in quarters tie often; chunks of 512 columns make several of a small vocabulary."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(-spread, spread + 1, (len(rows), vocab)).astype(np.float32) / 4)
    with mock.patch.object(sampling_draw, "CHUNK", 512), launches() as launched:
        by_kernel, by_sorting = drawn(logits, columns(*map(list, zip(*rows, strict=True))))
    assert by_kernel == by_sorting
    assert launched == {"_levels", "_pick", "_draw"}


def test_a_nucleus_of_thousands():
    """More candidates than one block, few ties, several rows."""
    logits = torch.randn(2, 2500, generator=torch.Generator().manual_seed(0))
    draws = columns([1.0, 1.3], [0, 1500], [1 - 1e-12, 1.0], [0.0, 0.0], [1 - 2.0**-53, 0.7])
    by_kernel, by_sorting = drawn(logits, draws)
    assert by_kernel == by_sorting


def test_both_zeros_are_one_logit():
    logits = torch.tensor([[0.0, -0.0] * 32])
    for u in (0.1, 0.4, 0.6, 0.9):
        by_kernel, by_sorting = drawn(logits, columns([1.0], [3], [0.7], [0.0], [u]))
        assert by_kernel == by_sorting


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_leaves_its_neighbour_alone(bad):
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    draws = columns([1.0, 1.0], [5, 5], [0.9, 0.9], [0.0, 0.0], [0.3, 0.3])
    whole, _ = drawn(logits, draws)
    logits[0, :] = bad
    broken, _ = drawn(logits, draws)
    assert broken[1] == whole[1]
    assert broken[0] == 0


@pytest.mark.parametrize("vocab", [32, 50, 1100, 2048])
def test_mask(vocab):
    rng = np.random.default_rng(vocab)
    words = torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, (2, -(-vocab // 32))).astype(np.int32)).clone()
    logits = torch.randn(4, vocab)
    actual, expected = logits.clone(), logits.clone()
    with launches() as launched:
        sampling_ops.mask_logits(actual, torch.tensor([3, 1]), words)
    assert launched == {"_mask"}
    with mock.patch.object(ops, "on_triton", return_value=False):
        sampling_ops.mask_logits(expected, torch.tensor([3, 1]), words)
    assert torch.equal(actual, expected)
    assert torch.isinf(actual[[1, 3]]).any() and torch.equal(actual[[0, 2]], logits[[0, 2]])


def test_a_kernel_is_for_rows_that_it_knows():
    assert sampling_ops.has_kernel(torch.zeros(2, 64))
    assert not sampling_ops.has_kernel(torch.zeros(2, 128)[:, ::2])
