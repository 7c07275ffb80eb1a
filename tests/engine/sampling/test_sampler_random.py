"""The random numbers: as documented, uniform, independent over seeds and positions; and what is drawn with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.engine.sampler_oracle import Request, step

from rootgraft.engine.sampling.sampler import Sampler
from rootgraft.engine.sampling.top_k_top_p import uniforms
from rootgraft.engine.types import SamplingParams

NUM = 20_000
# 99.99 % quantiles of the chi-square distribution, by degrees of freedom.
CRITICAL = {7: 29.88, 63: 111.5, 99: 157.1}


def _chi_square(observed: np.ndarray, expected: np.ndarray | float) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def _streams() -> dict[str, np.ndarray]:
    counter, zeros = np.arange(NUM, dtype=np.uint64), np.zeros(NUM, np.uint64)
    return {
        "positions of seed 0": uniforms(zeros, counter),
        "positions of a large seed": uniforms(zeros + np.uint64((1 << 63) - 1), counter),
        "seeds at position 0": uniforms(counter, zeros),
        "seeds at position 17": uniforms(counter, zeros + np.uint64(17)),
        "seed = position": uniforms(counter, counter),
    }


@pytest.mark.parametrize("name", _streams())
def test_numbers_are_uniform_and_neighbours_independent(name: str):
    u = _streams()[name]
    assert u.min() >= 0 and u.max() < 1
    cells = (u * 10).astype(int)
    pairs = np.bincount(cells[0::2] * 10 + cells[1::2], minlength=100)
    assert _chi_square(np.bincount((u * 64).astype(int), minlength=64), NUM / 64) < CRITICAL[63]
    assert _chi_square(pairs, NUM / 200) < CRITICAL[99]


def test_adjacent_seeds_are_not_one_stream_shifted():
    counter = np.arange(2000, dtype=np.uint64)
    streams = [set(uniforms(np.full(2000, seed, np.uint64), counter).tolist()) for seed in range(8)]
    assert len(set.union(*streams)) == 8 * 2000


def test_numbers_are_splitmix64():
    """Against the published sequence of SplitMix64 started at 1234567; the seed selects the start by one more mix."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    assert mix(1234567 + golden & mask) == 6457827717110365317  # first published output
    start = mix(42 + golden & mask)
    expected = [(mix(start + (n + 1) * golden & mask) >> 11) / 2**53 for n in range(5)]
    assert uniforms(np.full(5, 42, np.uint64), np.arange(5, dtype=np.uint64)).tolist() == expected


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=8), SamplingParams(top_p=0.99999)], ids=str)
def test_tokens_come_as_often_as_they_should(params: SamplingParams):
    logits = torch.tensor([0.0, 1.0, 0.5, -1.0, 2.0, 0.0, 1.5, -0.5])
    sampler = Sampler(NUM, 8, torch.device("cpu"))
    sampler.start([Request(params, seed=row).start(row) for row in range(NUM)])
    results = sampler.sample(logits.repeat(NUM, 1), [step(row, 0) for row in range(NUM)])
    counts = np.bincount([result.tokens[0] for result in results], minlength=8)
    assert _chi_square(counts, NUM * torch.softmax(logits.double(), 0).numpy()) < CRITICAL[7]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.8), SamplingParams(min_p=0.2)], ids=str)
def test_a_race_among_parts_and_blocks_draws_each_token_as_often_as_it_should(params: SamplingParams):
    """Eight tokens far apart: within a block, in blocks of one part, in several parts."""
    ids, scores = [3, 40, 70, 1000, 2047, 2048, 4500, 6100], [0.0, 1.0, 0.5, -1.0, 2.0, 0.0, 1.5, -0.5]
    logits = torch.full((6144,), -torch.inf)
    logits[ids] = torch.tensor(scores)
    draws = 2000
    sampler = Sampler(draws, 6144, torch.device("cpu"))
    sampler.start([Request(params, seed=row).start(row) for row in range(draws)])
    results = sampler.sample(logits.repeat(draws, 1), [step(row, 7) for row in range(draws)])
    counts = np.bincount([ids.index(result.tokens[0]) for result in results], minlength=8)
    probs = torch.softmax(torch.tensor(scores).double() / params.temperature, 0).numpy()
    probs[probs < params.min_p * probs.max()] = 0
    expected = draws * probs / probs.sum()
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    assert _chi_square(counts[kept], expected[kept]) < CRITICAL[7]


def test_draws_from_near_probabilities_are_mostly_the_same():
    """As many as their overlap allows, nearly: a draft model draws what the target does."""
    generator = torch.Generator().manual_seed(2)
    ours = torch.randn(512, 5000, generator=generator) * 2
    theirs = ours + torch.randn(512, 5000, generator=generator) * 0.1
    drawn = []
    for logits in (ours, theirs):
        sampler = Sampler(512, 5000, torch.device("cpu"))
        sampler.start([Request(SamplingParams(), seed=row).start(row) for row in range(512)])
        drawn.append([result.tokens for result in sampler.sample(logits.clone(), [step(row, 0) for row in range(512)])])
    same = np.mean([left == right for left, right in zip(*drawn, strict=True)])
    overlap = torch.minimum(ours.softmax(1), theirs.softmax(1)).sum(1).mean()
    assert same > 0.85 * float(overlap)
