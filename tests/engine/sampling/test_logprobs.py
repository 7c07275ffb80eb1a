"""Logprobs and ranks against float64 numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


NAMED = st.lists(st.integers(0, 49), min_size=1, max_size=40)


@given(st.lists(st.integers(0, 20) | NAMED, min_size=1, max_size=6))
def test_named_tokens_stand_in_the_place_of_the_best(wanted: list[int | list[int]]):
    logits = torch.randn(len(wanted), 50, generator=torch.Generator().manual_seed(len(wanted)))
    sampler = Sampler(len(wanted), 50, torch.device("cpu"))
    params = [
        SamplingParams(
            logprobs=each if isinstance(each, int) else 0, logprob_token_ids=() if isinstance(each, int) else (*each,)
        )
        for each in wanted
    ]
    sampler.start([Request(each, seed=row).start(row) for row, each in enumerate(params)])
    results = sampler.sample(logits.clone(), [step(row, 0) for row in range(len(wanted))])
    for line, each, result in zip(logits.numpy(), wanted, results, strict=True):
        [got] = result.logprobs
        if isinstance(each, int):
            _assert_close(got, _expected(line, got.token, each))
            continue
        every = dict(_expected(line, got.token, 50).top)
        assert [token for token, _ in got.top] == each
        assert [value for _, value in got.top] == pytest.approx([every[token] for token in each], abs=1e-5)
        assert got.logprob == pytest.approx(every[got.token], abs=1e-5)


def test_a_row_that_names_none_has_none_of_the_one_before():
    sampler, logits = Sampler(1, 50, torch.device("cpu")), torch.randn(1, 50)
    for params, count in ((SamplingParams(logprobs=0, logprob_token_ids=(7, 8)), 2), (SamplingParams(logprobs=1), 1)):
        sampler.start([Request(params).start(0)])
        [result] = sampler.sample(logits.clone(), [step(0, 0)])
        assert len(result.logprobs[0].top) == count
