"""Broken rows fail alone; extreme parameters and odd vocabularies work."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from support.engine.sampler_oracle import Request, packed, step

from rootgraft.engine.batch import RowResult
from rootgraft.engine.sampling import top_k_top_p
from rootgraft.engine.sampling.draft_verify import sampling_positions
from rootgraft.engine.sampling.sampler import DeviceMasks, Sampler
from rootgraft.engine.types import MAX_SEED, MIN_SEED, SamplingParams
from rootgraft.kernels.ops import largest

CPU = torch.device("cpu")
MODES = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(min_p=0.2),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.5),
    SamplingParams(logprobs=3),
    SamplingParams(temperature=0, repetition_penalty=1.5, logit_bias=((1, 3.0),)),
]


def _draw(requests: list[Request], logits: torch.Tensor, masks: DeviceMasks | None = None) -> list[RowResult]:
    sampler = Sampler(len(requests), logits.shape[1], CPU)
    sampler.start([request.start(row) for row, request in enumerate(requests)])
    rows = [step(row, len(request.generated)) for row, request in enumerate(requests)]
    return sampler.sample(logits.clone(), rows, masks)


@pytest.mark.parametrize("params", MODES, ids=str)
@pytest.mark.parametrize("vocab", [40, 300])
def test_a_broken_row_fails_alone(params: SamplingParams, vocab: int):
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(0))
    requests = [Request(params, (1, 2), seed=seed) for seed in range(6)]
    whole = _draw(requests, logits)
    broken = logits.clone()
    broken[0] = torch.nan
    broken[1, 17] = torch.nan
    broken[3, 5] = torch.inf
    broken[4] = -torch.inf
    results = _draw(requests, broken)
    assert [result.failed for result in results] == [True, True, False, True, True, False]
    assert (results[2], results[5]) == (whole[2], whole[5])
    assert results[0] == RowResult(failed=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_logit_is_not_hidden_by_a_mask(bad: float):
    logits = torch.zeros(1, 8)
    logits[0, 3] = bad
    only = tuple(token == 0 for token in range(8))
    assert _draw([Request(SamplingParams(), allowed=only)], logits, packed([only], 8))[0].failed


@pytest.mark.parametrize("params", MODES, ids=str)
def test_a_row_that_may_draw_nothing_fails(params: SamplingParams):
    nothing, one = (False,) * 40, tuple(token == 33 for token in range(40))
    requests = [Request(params, seed=seed) for seed in range(3)]
    results = _draw(requests, torch.zeros(3, 40), packed([nothing, one, None], 40))
    assert [result.failed for result in results] == [True, False, False]
    assert results[1].tokens == (33,)


def test_min_tokens_may_leave_nothing():
    params = SamplingParams(min_tokens=1)
    only = tuple(token < 2 for token in range(8))
    request = Request(params, stops=(0, 1), allowed=only)
    assert _draw([request], torch.zeros(1, 8), packed([only], 8))[0].failed


def test_a_failed_row_counts_no_token():
    """Its result is not a token: the next draw's penalties must not know it."""
    sampler = Sampler(1, 4, CPU)
    sampler.start([Request(SamplingParams(temperature=0, presence_penalty=2.0)).start(0)])
    assert sampler.sample(torch.full((1, 4), torch.nan), [step(0, 0)])[0].failed
    assert sampler.sample(torch.tensor([[1.0, 0.5, 0.0, 0.0]]), [step(0, 0)])[0].tokens == (0,)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300])
@pytest.mark.parametrize("extra", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("scale", [1e3, 1e25])
def test_temperatures_near_zero_are_greedy(temperature: float, extra: dict[str, float], scale: float):
    logits = torch.randn(8, 77, generator=torch.Generator().manual_seed(1)) * scale
    requests = [Request(SamplingParams(temperature=temperature, **extra), seed=seed) for seed in range(8)]
    assert [result.tokens[0] for result in _draw(requests, logits)] == logits.argmax(1).tolist()


@pytest.mark.parametrize("top_p", [0.0, 1e-300, 1e-9])
def test_a_tiny_top_p_keeps_the_best(top_p: float):
    logits = torch.zeros(20, 500)
    requests = [Request(SamplingParams(top_p=top_p), seed=seed) for seed in range(20)]
    assert {result.tokens for result in _draw(requests, logits)} == {(0,)}


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("params", [SamplingParams(top_k=50), SamplingParams(top_p=0.99999)], ids=str)
def test_the_extremes_of_the_random_number_draw_allowed_tokens(params: SamplingParams, u: float):
    allowed = tuple(100 <= token < 110 for token in range(200))
    with mock.patch("rootgraft.engine.sampling.sampler.uniforms", lambda seeds, _: np.full(len(seeds), u)):
        result = _draw([Request(params, allowed=allowed)], torch.zeros(1, 200), packed([allowed], 200))[0]
    assert result.tokens == ((100,) if u == 0 else (109,))


@pytest.mark.parametrize("noise", [2.0**-53, 1.0, 37.0])
def test_the_extremes_of_a_race_draw_allowed_tokens(noise: float):
    allowed = tuple(100 <= token < 110 for token in range(200))

    def extreme(seeds: np.ndarray, positions: np.ndarray, count: int) -> np.ndarray:
        return np.full((len(seeds), count), noise)

    with mock.patch("rootgraft.engine.sampling.sampler.exponentials", extreme):
        result = _draw([Request(SamplingParams(), allowed=allowed)], torch.zeros(1, 200), packed([allowed], 200))[0]
    assert result.tokens == (100,)  # all are level, and the first of them wins


@pytest.mark.parametrize("top_k", [0, 50, 500, 3000])
@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.97])
@pytest.mark.parametrize("min_p", [0.0, 0.5])
def test_the_first_looks_never_change_the_draw(top_k: int, top_p: float, min_p: float):
    """Distributions from one clear winner to nearly flat: kept tokens end within each of the widths."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(24, 5000, generator=generator) * torch.logspace(-1.5, 1, 24)[:, None]
    requests = [Request(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p), seed=seed) for seed in range(24)]
    quick = _draw(requests, logits)
    with mock.patch.object(top_k_top_p, "_WIDTHS", ()):
        assert _draw(requests, logits) == quick


def test_top_k_keeps_all_ties_of_the_kth():
    """All logits are equal: top_k=1 keeps all, with more ties than any first look takes in."""
    requests = [Request(SamplingParams(top_k=1), seed=seed) for seed in range(200)]
    drawn = {result.tokens[0] for result in _draw(requests, torch.zeros(200, 3000))}
    assert len(drawn) > 150 and max(drawn) > 2048


def test_top_k_beyond_the_vocabulary_is_off():
    logits = torch.randn(50, 10, generator=torch.Generator().manual_seed(2))
    beyond = [Request(SamplingParams(top_k=1 << 20), seed=seed) for seed in range(50)]
    without = [Request(SamplingParams(), seed=seed) for seed in range(50)]
    assert _draw(beyond, logits) == _draw(without, logits)


def test_every_seed_of_64_bits_has_draws_of_its_own():
    """Negative ones too: none is another's, none is an error, and each repeats itself."""
    seeds = [MIN_SEED, MIN_SEED + 1, -2, -1, 0, 1, 2, MAX_SEED - 1, MAX_SEED]
    requests = [Request(SamplingParams(), seed=seed) for seed in seeds]
    drawn = [result.tokens[0] for result in _draw(requests, torch.zeros(len(seeds), 1 << 20))]
    assert drawn == [result.tokens[0] for result in _draw(requests, torch.zeros(len(seeds), 1 << 20))]
    assert len(set(drawn)) == len(seeds)


def test_a_bias_of_100_decides():
    logits = torch.randn(10, 50, generator=torch.Generator().manual_seed(3))
    requests = [Request(SamplingParams(logit_bias=((49, 100.0), (3, -100.0))), seed=seed) for seed in range(10)]
    assert {result.tokens for result in _draw(requests, logits)} == {(49,)}


def test_greedy_takes_the_lowest_of_equal_tokens():
    logits = torch.zeros(1, 200)
    logits[0, [130, 70, 199]] = 1.0
    assert _draw([Request(SamplingParams(temperature=0))], logits)[0].tokens == (70,)


def test_logprobs_are_of_the_raw_logits_though_the_draw_is_not():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    params = SamplingParams(temperature=0, logit_bias=((2, 100.0),), logprobs=3)
    for masks in (None, packed([(True, False, True)], 3)):
        (scored,) = _draw([Request(params)], logits, masks)[0].logprobs
        assert (scored.token, scored.rank) == (2, 3)
        assert [token for token, _ in scored.top] == [0, 1, 2]
        assert scored.logprob == pytest.approx(torch.log_softmax(logits, 1)[0, 2].item())


def test_no_rows_give_no_results():
    assert Sampler(1, 8, CPU).sample(torch.zeros(0, 8), []) == []


@pytest.mark.parametrize("vocab", [40, 300])
def test_the_largest_logit_is_enough_for_plain_greedy_rows(vocab: int):
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1))
    logits[1, 7], logits[2] = torch.nan, logits[2, 5]
    sampler = Sampler(4, vocab, CPU)
    sampler.start([Request(SamplingParams(temperature=0), (1, 2)).start(row) for row in range(4)])
    rows = [step(row, 0) for row in range(4)]
    positions = sampling_positions(rows, {})
    assert sampler.takes_best(positions)
    by_largest = sampler.collect(sampler.draw(largest(logits), positions))
    assert by_largest == sampler.sample(logits, rows)
    assert [result.failed for result in by_largest] == [False, True, False, False]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0, logit_bias=((1, 3.0),)),
        SamplingParams(temperature=0, frequency_penalty=0.5),
        SamplingParams(temperature=0, min_tokens=2),
    ],
    ids=str,
)
def test_a_row_that_needs_more_than_the_largest_logit(params: SamplingParams):
    sampler = Sampler(2, 40, CPU)
    greedy = Request(SamplingParams(temperature=0), (1, 2))
    sampler.start([greedy.start(0), Request(params, (1, 2), stops=(3,)).start(1)])
    assert not sampler.takes_best(sampling_positions([step(0, 0), step(1, 0)], {}))
    assert sampler.takes_best(sampling_positions([step(0, 0)], {}))
    assert sampler.takes_best(sampling_positions([step(0, 2), step(1, 2)], {})) == bool(params.min_tokens)
