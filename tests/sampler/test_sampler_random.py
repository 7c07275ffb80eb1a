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
