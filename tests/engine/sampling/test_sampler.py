"""The whole chain against the plain oracle and against transformers' processors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine.sampler_oracle import Request, edited, may_draw, may_win, packed, step
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from benchmarks.gpu.measure import launches
from rootgraft.engine.batch import Row, RowResult, RowStart
from rootgraft.engine.sampling import top_k_top_p
from rootgraft.engine.sampling.sampler import DeviceMasks, Sampler
from rootgraft.engine.sampling.top_k_top_p import exponentials, uniforms
from rootgraft.engine.types import SamplingParams

CPU = torch.device("cpu")


@st.composite
def requests(draw: st.DrawFn, vocab: int) -> Request:
    tokens = st.lists(st.integers(0, vocab - 1), max_size=8).map(tuple)
    # Few of the tokens, so that answers often end with the beginning of a word.
    words = st.lists(st.integers(0, min(vocab, 4) - 1), min_size=1, max_size=3).map(tuple)
    penalty = st.sampled_from([0.0, 0.0, -0.5, 0.25, 2.0])
    bias = st.dictionaries(st.integers(0, vocab - 1), st.sampled_from([-100.0, -1.0, 0.5, 100.0]), max_size=3)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.5, 1.0, 1.75])),
        top_k=draw(st.one_of(st.just(0), st.integers(1, vocab + 3))),
        top_p=draw(st.one_of(st.just(1.0), st.sampled_from([1e-9, 0.5, 0.999999]), st.floats(0.01, 1.0))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0))),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.25, 2.0])),
        min_tokens=draw(st.integers(0, 4)),
        logit_bias=tuple(draw(bias).items()),
        allowed_token_ids=tuple(draw(st.one_of(st.just([]), st.lists(st.integers(0, vocab - 1), max_size=6)))),
        bad_words=tuple(draw(st.one_of(st.just([]), st.lists(words, max_size=4)))),
    )
    allowed = draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=vocab, max_size=vocab).map(tuple)))
    return Request(params, draw(tokens), draw(tokens), draw(tokens), draw(st.integers(0, (1 << 63) - 1)), allowed)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Request], np.ndarray]:
    vocab = draw(st.sampled_from([3, 32, 33, 64, 100, 200]))
    batch = draw(st.lists(requests(vocab), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    spread = draw(st.sampled_from([0, 2, 8, 40]))
    # Quarters: ties are frequent, and the oracle's edits are exact.
    return batch, rng.integers(-spread, spread + 1, (len(batch), vocab)).astype(np.float32) / 4


@given(cases(), st.sampled_from([(128, 2048), (4, 16), ()]))
def test_every_row_gets_what_the_oracle_allows(case: tuple[list[Request], np.ndarray], widths: tuple[int, ...]):
    batch, logits = case
    vocab = logits.shape[1]
    sampler = Sampler(len(batch), vocab, CPU)
    sampler.start([request.start(row) for row, request in enumerate(batch)])
    rows = [step(row, len(request.generated)) for row, request in enumerate(batch)]
    masks = packed([r.allowed for r in batch], vocab)
    with mock.patch.object(top_k_top_p, "_WIDTHS", widths):
        results = sampler.sample(torch.from_numpy(logits.copy()), rows, masks)
    for request, line, result in zip(batch, logits, results, strict=True):
        _check(request, edited(line, request), result.tokens, result.failed)


def _check(request: Request, logits: np.ndarray, tokens: tuple[int, ...], failed: bool) -> None:
    assert failed == (logits.max() == -np.inf)
    if failed:
        assert tokens == ()
    elif request.params.temperature == 0:
        assert tokens == (int(logits.argmax()),)
    else:
        at = np.array([request.seed], np.uint64), np.array([len(request.generated)], np.uint64)
        if request.params.top_p < 1 or 0 < request.params.top_k < len(logits):
            assert may_draw(tokens[0], uniforms(*at)[0], logits, request.params)
        else:
            assert may_win(tokens[0], exponentials(*at, 200)[0], logits, request.params)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.3, top_k=7),
        SamplingParams(temperature=0.9, top_p=0.8),
        SamplingParams(temperature=0.9, top_p=0.999),
        SamplingParams(temperature=1.1, top_k=49, min_p=0.1),
        SamplingParams(temperature=0.8, repetition_penalty=1.3, top_k=20, top_p=0.7, min_p=0.05),
    ],
    ids=str,
)
def test_distribution_is_that_of_transformers(params: SamplingParams, seed: int):
    """Evenly spaced u instead of random ones: each token is drawn in proportion to its probability, to 1 in N."""
    num, vocab, prompt = 4096, 50, (3, 7, 7, 11)
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    expected = torch.softmax(_transformers_chain(params)(torch.tensor([prompt]), logits.clone()), -1)[0]
    sampler = Sampler(num, vocab, CPU)
    sampler.start([Request(params, prompt).start(row) for row in range(num)])
    with mock.patch("rootgraft.engine.sampling.sampler.uniforms", lambda seeds, _: (np.arange(len(seeds)) + 0.5) / num):
        results = sampler.sample(logits.repeat(num, 1), [step(row, 0) for row in range(num)])
    counts = torch.bincount(torch.tensor([result.tokens[0] for result in results]), minlength=vocab)
    assert (counts[expected == 0] == 0).all()
    torch.testing.assert_close(counts / num, expected, atol=1.5 / num, rtol=0)


def _transformers_chain(params: SamplingParams) -> LogitsProcessorList:
    chain = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    return chain


def test_drawn_tokens_are_counted_for_the_penalties():
    """A greedy row whose best two tokens are close walks away from what it has said."""
    params = SamplingParams(temperature=0, frequency_penalty=1.0, presence_penalty=0.25)
    sampler = Sampler(1, 4, CPU)
    sampler.start([Request(params, prompt=(0, 0, 0)).start(0)])
    drawn: list[int] = []
    for position in range(8):
        logits = np.array([2.0, 1.5, 0.0, -50.0], np.float32)
        expected = edited(logits, Request(params, (0, 0, 0), tuple(drawn))).argmax()
        drawn += sampler.sample(torch.from_numpy(logits)[None], [step(0, position)])[0].tokens
        assert drawn[-1] == expected
    assert set(drawn) == {0, 1, 2}


def test_penalties_grow_beyond_the_room_they_started_with():
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    sampler = Sampler(1, 100, CPU)
    sampler.start([Request(params).start(0)])
    logits = torch.linspace(1, 0, 100)[None]
    drawn = [sampler.sample(logits.clone(), [step(0, position)])[0].tokens[0] for position in range(100)]
    assert drawn == list(range(100))


def test_stop_tokens_wait_for_min_tokens():
    sampler = Sampler(1, 4, CPU)
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(0, 999))
    sampler.start([Request(params, stops=(0, 1, 999)).start(0)])
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    assert [sampler.sample(logits.clone(), [step(0, n)])[0].tokens for n in range(3)] == [(2,), (2,), (0,)]


@pytest.mark.usefixtures("interpreted")
def test_rows_on_a_gpu_draw_the_tokens_of_a_cpu() -> None:
    """By the same seeds and positions, whatever rows ask for, from a table that is written when they start."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.02, "logprobs": 2},
        {"top_k": 7, "top_p": 0.9, "repetition_penalty": 1.3},
        {"top_n_sigma": 1.2, "presence_penalty": 0.4},
        {"temperature": 1e-30, "logit_bias": ((5, 8.0),)},
    ]
    starts = [
        RowStart(9 - row, SamplingParams(**each), [3, 4, 5, 3], 2, (), seed=row - 3) for row, each in enumerate(options)
    ]
    logits = torch.randn(6, 90, generator=torch.Generator().manual_seed(4))
    words = torch.tensor([[0x7FFFFFFF, -2, -1]], dtype=torch.int32)

    def drawn() -> list[RowResult]:
        sampler = Sampler(10, 90, CPU)
        sampler.start([replace(start, seed=99, params=SamplingParams()) for start in starts])
        sampler.start(starts)
        rows = [Row(start.row, 0, (), 0, (), draws=True, num_generated=2) for start in starts]
        masks = DeviceMasks(torch.tensor([2]), words)
        return [result for _ in range(2) for result in sampler.sample(logits.clone(), rows, masks)]

    with launches() as launched:
        by_kernel = drawn()
    assert {"_draw", "_mask"} <= launched
    with mock.patch("rootgraft.engine.sampling.sampler.on_triton", return_value=False):
        by_host = drawn()
    assert [result.tokens for result in by_kernel] == [result.tokens for result in by_host]
    assert [bool(result.logprobs) for result in by_kernel] == [bool(result.logprobs) for result in by_host]
