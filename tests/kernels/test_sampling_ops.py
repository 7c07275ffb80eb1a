"""Random draws by the native kernel: against their definition in torch, and the same whatever the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.engine.sampler_oracle import may_win
from torch import Tensor

from rootgraft.engine.sampling.top_k_top_p import draw_any, exponentials, num_noise, pad
from rootgraft.engine.types import SamplingParams
from rootgraft.kernels.layouts.draw_params import DrawParams
from rootgraft.kernels.ops import native_kernels
from rootgraft.kernels.sampling_ops import draw_tokens, draws_tokens

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="no C++ compiler")

CLOSE = 1e-5  # of all probability, by which a draw may be beside its token's share


def params(
    u: Tensor,
    noise: Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> DrawParams:
    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((len(u), 1), value, dtype=dtype)

    floats, doubles = torch.float32, torch.float64
    columns = column(temperature, floats), column(top_k, torch.int64), column(top_p, doubles), column(min_p, floats)
    return DrawParams(*columns, u.double().view(-1, 1), noise)


def draw(logits: Tensor, u: float, noise: Tensor | None = None, **others: Any) -> int:
    return int(draw_tokens(logits, params(torch.tensor([u], dtype=torch.float64), noise, **others)))


def noise_of(rows: int, width: int, seed: int = 0) -> Tensor:
    seeds, positions = np.arange(rows, dtype=np.uint64) + np.uint64(seed), np.zeros(rows, np.uint64)
    return torch.from_numpy(exponentials(seeds, positions, num_noise(width)))


@given(
    st.integers(1, 9000), st.sampled_from([0.1, 1.0, 9.0]), st.sampled_from([0.0, 0.01, 0.5]), st.integers(0, 1 << 30)
)
def test_races_are_won_by_whom_torch_says(columns: int, temperature: float, min_p: float, seed: int) -> None:
    """But for rounding, whose winner the oracle admits."""
    logits, noise = (
        3 * torch.randn(1, columns, generator=torch.Generator().manual_seed(seed)),
        noise_of(1, columns, seed),
    )
    token = draw(logits, 0.0, noise, temperature=temperature, min_p=min_p)
    columns_of = params(torch.zeros(1), noise, temperature=temperature, min_p=min_p)
    expected = int(draw_any(pad(logits), logits.amax(1, keepdim=True), columns_of, use_min_p=True))
    kept = SamplingParams(temperature=temperature, min_p=min_p)
    assert token == expected or may_win(token, noise[0].numpy(), logits[0].numpy(), kept)


def test_the_width_of_the_logits_changes_nothing() -> None:
    logits = torch.randn(1, 5000)
    wide = torch.nn.functional.pad(logits, (0, 3000), value=-torch.inf)
    for seed in range(50):
        assert draw(logits, 0.0, noise_of(1, 5000, seed)) == draw(wide, 0.0, noise_of(1, 8000, seed))


@given(
    st.integers(1, 3000), st.floats(0, 1, exclude_max=True), st.sampled_from([0, 1, 2, 40, 3000]),
    st.sampled_from([0.0, 0.1, 0.9, 0.999, 1.0]), st.sampled_from([0.0, 0.05]), st.sampled_from([0.1, 1.0, 30.0]),
    st.booleans(), st.integers(0, 1 << 30),
)  # fmt: skip
def test_tokens_after_top_k_and_top_p(
    columns: int, u: float, top_k: int, top_p: float, min_p: float, temperature: float, ties: bool, seed: int
) -> None:
    """Against torch's sorted probabilities in float64; where the number falls beside an edge, either side is right."""
    logits = 4 * torch.randn(columns, generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if ties else logits
    top_k = top_k if top_k < columns else 0
    assume(top_k or top_p < 1)  # else tokens are drawn in the order of their numbers
    values, ids = torch.sort(logits, descending=True, stable=True)
    probs = torch.softmax(values.double() / temperature, 0)
    kept = values >= values[top_k - 1] if top_k else torch.ones_like(values, dtype=torch.bool)
    mass, before = probs[kept].sum(), torch.cumsum(probs, 0) - probs
    surely = kept & (before < mass * top_p - CLOSE) & (probs >= min_p * probs[0] * (1 + 1e-5))
    perhaps = kept & (before < mass * top_p + CLOSE) & (probs >= min_p * probs[0] * (1 - 1e-5))
    token = draw(logits[None], u, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    place = int((ids == token).nonzero())
    assert place == 0 or perhaps[place]
    least, most = float(probs[surely].sum()), float(probs[perhaps].sum())
    assert float(before[place]) / max(most, float(probs[0])) - CLOSE <= u
    assert u <= float(before[place] + probs[place]) / max(least, 1e-9) + CLOSE


def test_of_many_races_each_token_wins_its_part() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -torch.inf, 0.5]])
    n = 20_000
    columns = params(torch.zeros(n), noise_of(n, 6))
    tokens = draw_tokens(logits.repeat(n, 1), columns)
    expected = torch.softmax(logits[0].double(), 0)
    torch.testing.assert_close(torch.bincount(tokens, minlength=6) / n, expected.float(), rtol=0, atol=0.015)


@pytest.mark.parametrize("columns", [1, 15, 17, 49_152, 300_001])
def test_a_line_alone_and_among_others(columns: int) -> None:
    logits = torch.randn(5, columns)
    u, noise = torch.rand(5, dtype=torch.float64), noise_of(5, columns)
    for kept in ({}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 40, "top_p": 0.5, "min_p": 0.1}, {"temperature": 0.0}):
        together = draw_tokens(logits, params(u, noise, **kept))
        alone = [draw(logits[i : i + 1], float(u[i]), noise[i : i + 1], **kept) for i in range(5)]
        assert together.tolist() == alone


def test_the_ends_of_the_range() -> None:
    logits = torch.full((1, 700), -torch.inf)
    logits[0, [3, 600]] = torch.tensor([1.0, 1.0])
    below_one = float(np.nextafter(1.0, 0.0))
    assert [draw(logits, u, top_k=5) for u in (0.0, 0.499, 0.501, below_one)] == [3, 3, 600, 600]
    peaked = torch.randn(1, 700)
    best, noise = int(peaked.argmax()), noise_of(1, 700)
    assert draw(peaked, below_one, top_p=0.0) == draw(peaked, below_one, top_k=9, min_p=1.0) == best
    assert draw(peaked, 0.0, noise, temperature=1e-20) == draw(peaked, 0.0, noise, min_p=1.0) == best


@given(st.integers(1, 100), st.sampled_from([0.0, 1.0]), st.sampled_from([1.0, 0.5]), st.integers(0, 1 << 30))
def test_a_line_whose_largest_logit_is_not_finite(columns: int, temperature: float, top_p: float, seed: int) -> None:
    noise, at = noise_of(2, columns), seed % columns
    for value in (torch.nan, torch.inf):
        logits = torch.randn(2, columns, generator=torch.Generator().manual_seed(seed))
        logits[0, at] = value
        tokens = draw_tokens(logits, params(torch.full((2,), 0.5), noise, temperature=temperature, top_p=top_p))
        assert tokens[0] == -1 and 0 <= tokens[1] < columns
    logits = torch.full((1, columns), -torch.inf)
    assert draw(logits, 0.5, noise[:1], temperature=temperature, top_p=top_p) == -1


@given(st.integers(1, 300), st.integers(0, 1 << 30))
def test_masked_tokens_are_never_drawn(columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, columns, generator=generator)
    logits[torch.rand(8, columns, generator=generator) < 0.9] = -torch.inf
    logits[:, seed % columns] = -20.0
    tokens = draw_tokens(logits, params(torch.rand(8, generator=generator), noise_of(8, columns, seed)))
    assert logits[torch.arange(8), tokens].isfinite().all()


def test_without_temperature_the_first_of_the_likeliest() -> None:
    logits = torch.randn(6, 1000).round()
    tokens = draw_tokens(logits, params(torch.rand(6), temperature=0.0))
    assert torch.equal(tokens, (logits == logits.amax(1, keepdim=True)).int().argmax(1))


def test_wrong_arguments() -> None:
    logits, one, ranked = torch.zeros(1, 10), torch.ones(1, 1), params(torch.zeros(1), top_k=1)
    with pytest.raises(ValueError, match="temperature must be"):
        draw_tokens(logits, ranked._replace(temperature=one.double()))
    with pytest.raises(ValueError, match="u must be"):
        draw_tokens(
            torch.zeros(2, 10),
            ranked._replace(
                temperature=torch.ones(2, 1),
                top_k=torch.ones(2, 1).long(),
                top_p=torch.ones(2, 1).double(),
                min_p=torch.zeros(2, 1),
            ),
        )
    with pytest.raises(ValueError, match="noise must be"):
        draw_tokens(logits, ranked._replace(noise=torch.ones(1, 96).double()))
    with pytest.raises(ValueError, match="noise is missing"):
        draw(logits, 0.5)


def test_which_logits_are_taken() -> None:
    assert draws_tokens(torch.zeros(2, 10))
    assert not draws_tokens(torch.zeros(2, 10).bfloat16()) and not draws_tokens(torch.zeros(10, 2).T)
