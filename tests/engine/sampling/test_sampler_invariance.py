"""Same seed, same text, whatever shares the batch; and nothing of a row's former occupant remains."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from support.engine.sampler_oracle import Request, packed, step

from rootgraft.engine.batch import RowResult
from rootgraft.engine.sampling.sampler import Sampler
from rootgraft.engine.types import SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch divides work between threads by the shape of the batch: results must not see it."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _request(rng: random.Random, vocab: int) -> Request:
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.0, 1.6]),
        top_k=rng.choice([0, 0, 5, 40, 300]),
        top_p=rng.choice([1.0, 1.0, 0.3, 0.9, 0.99]),
        min_p=rng.choice([0.0, 0.0, 0.02]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        min_tokens=rng.choice([0, 0, 3]),
        logit_bias=rng.choice([(), (), ((1, 5.0), (2, -100.0))]),
        bad_words=rng.choice([(), (), ((6,), (7, 8), (8, 7, 9))]),
        logprobs=rng.choice([None, None, 0, 5, 20]),
    )
    prompt = tuple(rng.randrange(vocab) for _ in range(rng.randrange(20)))
    allowed = tuple(rng.random() < 0.5 for _ in range(vocab)) if rng.random() < 0.3 else None
    return Request(params, prompt, stops=(0, 5), seed=rng.randrange(1 << 63), allowed=allowed)


def _logits(request: Request, position: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(request.seed % 1_000_003 + position)
    rough = torch.randn(vocab, generator=generator) * (1 + request.seed % 4)
    return rough.bfloat16().float()  # ties, as models of that dtype give them


def _sample(sampler: Sampler, batch: list[tuple[int, Request, int]], vocab: int, device: str) -> list[RowResult]:
    """One step of (row, request, number of tokens it has generated)."""
    logits = torch.stack([_logits(request, position, vocab) for _, request, position in batch])
    masks = packed([request.allowed for _, request, _ in batch], vocab, device)
    return sampler.sample(logits.to(device), [step(row, position) for row, _, position in batch], masks)


@dataclass
class _Running:
    request: Request
    row: int
    results: list[RowResult] = field(default_factory=list)

    @property
    def drawn(self) -> tuple[int, ...]:
        return tuple(result.tokens[0] for result in self.results)


def _alone(request: Request, length: int, vocab: int, device: str) -> list[RowResult]:
    sampler = Sampler(1, vocab, torch.device(device))
    sampler.start([request.start(0)])
    return [_sample(sampler, [(0, request, position)], vocab, device)[0] for position in range(length)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("vocab", "num_requests", "length"), [(203, 60, 8), (1024, 30, 6), (20_001, 16, 4)])
def test_a_row_in_any_company_is_the_row_alone(vocab: int, num_requests: int, length: int, device: str):
    """Rows join, leave, wait, are preempted and resume elsewhere; every result is equal to the bit."""
    rng = random.Random(vocab)
    waiting = [_Running(_request(rng, vocab), -1) for _ in range(num_requests)]
    everyone, running, free = list(waiting), [], list(range(9))
    sampler = Sampler(9, vocab, torch.device(device))
    while waiting or running:
        starts = []
        while waiting and free and rng.random() < 0.7:
            one = waiting.pop(rng.randrange(len(waiting)))
            one.row = free.pop(rng.randrange(len(free)))
            starts.append(one.request.start(one.row, one.drawn))
            running.append(one)
        sampler.start(starts)
        drawing = rng.sample(running, rng.randint(0, len(running)))
        batch = [(one.row, one.request, len(one.results)) for one in drawing]
        for one, result in zip(drawing, _sample(sampler, batch, vocab, device) if batch else [], strict=True):
            one.results.append(result)
        for one in list(running):
            preempted = rng.random() < 0.05
            if preempted or len(one.results) == length:
                running.remove(one)
                free.append(one.row)
                if len(one.results) < length:
                    waiting.append(one)
    for one in everyone:
        assert not any(result.failed for result in one.results)
        assert one.results == _alone(one.request, length, vocab, device)


@pytest.mark.parametrize("vocab", [20_001, 49_152])
@pytest.mark.usefixtures("threads")
def test_full_vocabulary_to_the_bit(vocab: int):
    """At a real vocabulary's size, where torch splits single rows between threads."""
    rng = random.Random(1)
    batch = [(row, _request(rng, vocab), 0) for row in range(12)]
    sampler = Sampler(12, vocab, torch.device("cpu"))
    sampler.start([request.start(row) for row, request, _ in batch])
    together = _sample(sampler, batch, vocab, "cpu")
    assert together == [_alone(request, 1, vocab, "cpu")[0] for _, request, _ in batch]


def test_nothing_of_the_former_occupant_remains():
    vocab, rng = 64, random.Random(2)
    everything = SamplingParams(
        temperature=2.0,
        top_k=2,
        top_p=0.1,
        min_p=0.9,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repetition_penalty=2.0,
        min_tokens=100,
        logit_bias=tuple((token, -100.0) for token in range(32)),
        logprobs=20,
        prompt_logprobs=7,
    )
    sampler = Sampler(2, vocab, torch.device("cpu"))
    sampler.start([Request(everything, tuple(range(64)), (1, 2), stops=tuple(range(40))).start(row) for row in (0, 1)])
    assert sampler.num_prompt_logprobs(0) == 7
    _sample(sampler, [(0, Request(everything), 2), (1, Request(everything), 2)], vocab, "cpu")
    for trial in range(30):
        newcomer = _request(rng, vocab)
        sampler.start([newcomer.start(0)])
        assert sampler.num_prompt_logprobs(0) == 0
        got = [_sample(sampler, [(0, newcomer, position)], vocab, "cpu")[0] for position in range(3)]
        assert got == _alone(newcomer, 3, vocab, "cpu"), trial
