"""Random draws by the native kernel: against probabilities in float64, and the same whatever the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rootgraft.kernels.ops import native_kernels
from rootgraft.kernels.sampling_ops import draw_tokens, draws_tokens

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="no C++ compiler")

CLOSE = 1e-5  # of all probability, by which a draw may be beside its token's share


def draw(logits: Tensor, u: float, temperature: float = 1.0, min_p: float = 0.0, line: int = 0) -> int:
    column = torch.tensor([[temperature]]), torch.tensor([[min_p]]), torch.tensor([[u]], dtype=torch.float64)
    best = logits[line].max().view(1, 1)
    return int(draw_tokens(logits, torch.tensor([line]), best, *column))


def shares(logits: Tensor, temperature: float, min_p: float) -> np.ndarray:
    scaled = logits.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < min_p * (1 - 1e-6)] = 0
    return np.concatenate(([0.0], np.cumsum(weights) / weights.sum()))


@given(
    st.integers(1, 5000), st.floats(0, 1, exclude_max=True), st.floats(0.05, 20), st.sampled_from([0.0, 0.01, 0.5]),
    st.integers(0, 1 << 30),
)  # fmt: skip
def test_tokens_have_their_shares(columns: int, u: float, temperature: float, min_p: float, seed: int) -> None:
    logits = 3 * torch.randn(1, columns, generator=torch.Generator().manual_seed(seed))
    token, edges = draw(logits, u, temperature, min_p), shares(logits[0], temperature, min_p)
    assert edges[token] - CLOSE <= u <= edges[token + 1] + CLOSE
    assert edges[token + 1] > edges[token], "nothing that is left out is drawn"


def test_of_many_draws_each_token_gets_its_part() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -torch.inf, 0.5]])
    n = 20_000
    u = (torch.arange(n, dtype=torch.float64)[:, None] + 0.5) / n
    ones = torch.ones(n, 1)
    tokens = draw_tokens(logits, torch.zeros(n, dtype=torch.int64), 2 * ones, ones, 0 * ones, u)
    expected = torch.softmax(logits[0].double(), 0)
    torch.testing.assert_close(torch.bincount(tokens, minlength=6) / n, expected.float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("columns", [1, 15, 17, 49_152, 300_001])
def test_a_line_alone_and_among_others(columns: int) -> None:
    logits = torch.randn(5, columns)
    u = torch.rand(5, 1, dtype=torch.float64)
    best, ones = logits.amax(1, keepdim=True), torch.ones(5, 1)
    together = draw_tokens(logits, torch.tensor([4, 3, 2, 1, 0]), best.flip(0), ones, 0 * ones, u)
    assert together.tolist() == [draw(logits, float(u[i]), line=4 - i) for i in range(5)]


def test_the_ends_of_the_range() -> None:
    logits = torch.full((1, 700), -torch.inf)
    logits[0, [3, 600]] = torch.tensor([1.0, 1.0])
    below_one = float(np.nextafter(1.0, 0.0))
    assert [draw(logits, u) for u in (0.0, 0.499, 0.501, below_one)] == [3, 3, 600, 600]
    peaked = torch.randn(1, 700)
    assert draw(peaked, below_one, temperature=1e-20) == int(peaked.argmax()) == draw(peaked, below_one, min_p=1.0)


def test_what_is_not_finite_gives_some_token() -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        assert 0 <= draw(torch.full((1, 100), value), 0.5) < 100


def test_lines_outside_of_the_logits() -> None:
    logits, one = torch.zeros(2, 10), torch.ones(1, 1)
    for line in (-1, 2):
        with pytest.raises(IndexError, match="2 lines"):
            draw_tokens(logits, torch.tensor([line]), one, one, one, one.double())
    with pytest.raises(ValueError, match="temperature must be"):
        draw_tokens(logits, torch.tensor([0]), one, one.double(), one, one.double())


def test_which_logits_are_taken() -> None:
    assert draws_tokens(torch.zeros(2, 10))
    assert not draws_tokens(torch.zeros(2, 10).bfloat16()) and not draws_tokens(torch.zeros(10, 2).T)
