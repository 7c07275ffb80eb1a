"""A token that does not fit is drawn again: each that fits has its share of what the filters keep, greedy the best."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from rootgraft.engine.batch import Row, RowStart
from rootgraft.engine.sampling.draft_verify import sampling_positions
from rootgraft.engine.sampling.sampler import DeviceMasks, Sampler
from rootgraft.engine.types import SamplingParams

VOCAB = 70
DRAWS = 4_000


class FakeCheck:
    """Some tokens fit; neighbours of two are alike."""

    def __init__(self, fitting: set[int]) -> None:
        self.fitting = fitting
        self.num_tests = 0

    def fits(self, token: int) -> bool:
        self.num_tests += 1
        return token in self.fitting

    def alike(self, token: int) -> np.ndarray:
        pair = {token, token ^ 1}
        return np.array(sorted(pair if pair.isdisjoint(self.fitting) or pair <= self.fitting else {token}))

    def known(self) -> np.ndarray:
        return self.limits()

    def limits(self) -> np.ndarray:
        bits = np.zeros(96, dtype=np.bool_)
        bits[sorted(self.fitting)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


def draw(logits: torch.Tensor, fitting: set[int], seeds: range, **params) -> list:
    sampler = Sampler(1, VOCAB, torch.device("cpu"))
    results = []
    everything = torch.from_numpy(np.full((1, 3), -1, dtype=np.int32))
    for seed in seeds:
        sampler.start([RowStart(0, SamplingParams(**params), [1], 1, (), seed)])
        positions = sampling_positions([Row(0, 0, [1], 0, (), True, 0)], {})
        masks = DeviceMasks(torch.tensor([0]), everything, {0: FakeCheck(fitting)})
        results += sampler.collect(sampler.draw(logits[None].clone(), positions, masks))
    return results


def line() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).normal(0, 1.5, VOCAB).astype(np.float32))


def test_a_greedy_draw_is_the_likeliest_that_fits():
    logits = line()
    order = logits.argsort(descending=True).tolist()
    for number in (1, 2, 7, 69):
        [result] = draw(logits, set(order[number:]), range(1), temperature=0.0)
        assert result.tokens == (order[number],) and result.is_limited
    [result] = draw(logits, {order[0], order[5]}, range(1), temperature=0.0)
    assert result.tokens == (order[0],) and not result.is_limited


@pytest.mark.parametrize("params", [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9}])
@pytest.mark.parametrize("every", [2, 5])
def test_each_token_that_fits_has_its_share(params, every):
    """Of the probability of all that the filters keep and that fit; chi-squared against the exact shares."""
    logits = line()
    free = Counter(result.tokens[0] for result in draw(logits, set(range(VOCAB)), range(DRAWS), **params))
    fitting = {token for token in range(VOCAB) if token // 2 % every == 0}
    found = Counter(result.tokens[0] for result in draw(logits, fitting, range(DRAWS, 2 * DRAWS), **params))
    assert set(found) <= fitting
    probs = torch.softmax(logits.double(), 0).numpy()
    kept = {token: probs[token] for token in free if token in fitting}
    total = sum(kept.values())
    expected = {token: DRAWS * prob / total for token, prob in kept.items()}
    large = [token for token, count in expected.items() if count >= 8]
    statistic = sum((found[token] - expected[token]) ** 2 / expected[token] for token in large)
    assert statistic < len(large) + 5 * (2 * len(large)) ** 0.5


def test_what_no_filter_keeps_is_drawn_if_nothing_else_fits():
    logits = line()
    worst = int(logits.argmin())
    for result in draw(logits, {worst}, range(20), top_k=3):
        assert result.tokens == (worst,) and result.is_limited


def test_without_excluded_tokens_a_draw_is_the_same_as_without_a_budget():
    logits = line()
    limited = draw(logits, set(range(VOCAB)), range(300))
    sampler = Sampler(1, VOCAB, torch.device("cpu"))
    for seed, result in zip(range(300), limited, strict=True):
        sampler.start([RowStart(0, SamplingParams(), [1], 1, (), seed)])
        [plain] = sampler.sample(logits[None].clone(), [Row(0, 0, [1], 0, (), True, 0)])
        assert plain.tokens == result.tokens and not result.is_limited


def test_logprobs_are_those_of_the_token_that_was_drawn_again():
    logits = line()
    order = logits.argsort(descending=True).tolist()
    [result] = draw(logits, {order[4]}, range(1), temperature=0.0, logprobs=2)
    expected = float(torch.log_softmax(logits.double(), 0)[order[4]])
    assert result.tokens == (order[4],) and result.logprobs[0].token == order[4]
    assert result.logprobs[0].logprob == pytest.approx(expected, abs=1e-4) and result.logprobs[0].rank == 5
