"""Logprobs and ranks against float64 numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.engine.sampler_oracle import Request, step

from rootgraft.engine.sampling.logprobs import prompt_logprobs
from rootgraft.engine.sampling.sampler import Sampler
from rootgraft.engine.types import Logprob, SamplingParams


def _expected(logits: np.ndarray, token: int, num_top: int) -> Logprob:
    logits = logits.astype(np.float64)
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    best = sorted(range(len(logits)), key=lambda other: (-logits[other], other))[:num_top]
    rank = 1 + int((logits > logits[token]).sum())
    return Logprob(token, logprobs[token], rank, tuple((other, logprobs[other]) for other in best))


def _assert_close(got: Logprob, expected: Logprob) -> None:
    assert (got.token, got.rank) == (expected.token, expected.rank)
    assert got.logprob == pytest.approx(expected.logprob, abs=1e-5, rel=1e-5)
    assert [token for token, _ in got.top] == [token for token, _ in expected.top]
    assert [p for _, p in got.top] == pytest.approx([p for _, p in expected.top], abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab", [3, 20, 64, 1001])
def test_prompt_logprobs(vocab: int, num_top: int):
    logits = torch.randn(30, vocab, generator=torch.Generator().manual_seed(vocab)) * 5
    tokens = torch.randint(vocab, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    got = prompt_logprobs(logits, tokens, num_top)()
    for line, token, scored in zip(logits.numpy(), tokens, got, strict=True):
        _assert_close(scored, _expected(line, token, num_top))


def test_ties_name_the_lower_id_first_and_share_a_rank():
    logits = torch.zeros(1, 100)
    logits[0, [80, 9, 40]] = 2.0
    (scored,) = prompt_logprobs(logits, [40], 3)()
    assert scored.rank == 1
    assert [token for token, _ in scored.top] == [9, 40, 80]


def test_each_row_gets_as_many_as_it_asked_for():
    wanted = [None, 0, 3, 20]
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(4, 50, torch.device("cpu"))
    sampler.start([Request(SamplingParams(logprobs=num), seed=row).start(row) for row, num in enumerate(wanted)])
    results = sampler.sample(logits.clone(), [step(row, 0) for row in range(4)])
    assert results[0].logprobs == ()
    for line, num, result in zip(logits.numpy()[1:], wanted[1:], results[1:], strict=True):
        _assert_close(result.logprobs[0], _expected(line, result.tokens[0], num))
