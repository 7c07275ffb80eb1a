"""Several places of a row at once: the tokens, logprobs and counts of one place after the other."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.sampler_oracle import Request, packed
from support.machine.thoroughness import repeats

from rootgraft.engine.batch import Row, RowResult
from rootgraft.engine.sampling.sampler import Sampler
from rootgraft.engine.types import SamplingParams

CPU = torch.device("cpu")
VOCAB = 40
STOPS = (4, 5)

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_p=st.sampled_from([0.6, 1.0]),
    top_k=st.sampled_from([0, 5]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    min_tokens=st.sampled_from([0, 4]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (8, -5.0))]),
    bad_words=st.sampled_from([(), ((7,), (3, 9)), tuple((a, b) for a in range(10, VOCAB) for b in range(10, 20))]),
    logprobs=st.sampled_from([None, 0, 2]),
)


class Model:
    """Logits that follow from the last token and the place; which tokens are allowed, too, if there is a grammar."""

    def __init__(self, seed: int, masked: bool) -> None:
        draw = np.random.default_rng(seed)
        self.logits = torch.from_numpy(draw.normal(0, 3, (VOCAB, 12, VOCAB)).astype(np.float32))
        self.allowed = draw.random((VOCAB, 12, VOCAB)) < draw.choice([0.1, 0.5, 0.9])
        # Something beside the stop tokens, which ``min_tokens`` may ban.
        self.allowed[:, :, 1] |= ~np.delete(self.allowed, STOPS, axis=2).any(2)
        self.masked = masked

    def mask(self, last: int, place: int) -> tuple[bool, ...] | None:
        return tuple(self.allowed[last, place].tolist()) if self.masked else None


def row_of(number: int, num_generated: int, last: int, drafts: list[int]) -> Row:
    return Row(number, 0, [last, *drafts], 0, (), True, num_generated, len(drafts))


def sample(sampler: Sampler, models: list[Model], rows: list[Row], skip_forced: bool) -> list[RowResult]:
    """A step; the lines that masks leave no choice about get no logits if ``skip_forced``."""
    lines = [
        (model, token, row.num_generated + ahead)
        for model, row in zip(models, rows, strict=True)
        for ahead, token in enumerate(row.tokens)
    ]
    masks = [model.mask(token, place) for model, token, place in lines]
    only = {i: mask.index(True) for i, mask in enumerate(masks) if mask and sum(mask) == 1}
    forced = only if skip_forced else {}
    kept = [i for i in range(len(lines)) if i not in forced]
    logits = [lines[i][0].logits[lines[i][1], lines[i][2]] for i in kept]
    allowed = packed([masks[i] for i in kept], VOCAB)
    return sampler.sample(torch.stack(logits).clone() if logits else None, rows, allowed, forced)


@settings(max_examples=repeats(70), deadline=None)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    masked=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_drafts_leave_no_trace_in_what_is_drawn(params, seed, masked):
    rng = random.Random(seed)
    models = [Model(seed + i, masked[i]) for i in range(len(params))]
    requests = [Request(each, prompt=(1, 2, 3), stops=STOPS, seed=rng.randrange(100)) for each in params]
    alone, drafting = Sampler(8, VOCAB, CPU), Sampler(8, VOCAB, CPU)
    for sampler in (alone, drafting):
        sampler.start([request.start(i) for i, request in enumerate(requests)])
    expected: list[list[RowResult]] = [[] for _ in params]
    for place in range(10):
        rows = [row_of(i, place, results[-1].tokens[0] if results else 3, []) for i, results in enumerate(expected)]
        for i, result in enumerate(sample(alone, models, rows, False)):
            expected[i].append(result)
    tokens = [[result.tokens[0] for result in results] for results in expected]
    got: list[list[RowResult]] = [[] for _ in params]
    done = [0] * len(params)
    while any(count < 10 for count in done):
        alive = [i for i, count in enumerate(done) if count < 10]
        rows = []
        for i in alive:
            right = tokens[i][done[i] : done[i] + rng.randint(0, 4)]
            garbage = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 2))]
            drafts = [*right, *garbage][: 9 - done[i]]
            rows.append(row_of(i, done[i], tokens[i][done[i] - 1] if done[i] else 3, drafts))
        skip = all(params[i].logprobs is None for i in alive)
        for i, row, result in zip(alive, rows, sample(drafting, [models[i] for i in alive], rows, skip), strict=True):
            drafts = list(row.drafts)
            assert list(result.tokens[:-1]) == drafts[: len(result.tokens) - 1]
            got[i].append(result)
            done[i] += len(result.tokens)
    for i in range(len(params)):
        assert [token for result in got[i] for token in result.tokens] == tokens[i]
        assert [x for result in got[i] for x in result.logprobs] == [
            x for result in expected[i] for x in result.logprobs
        ]


def test_a_place_that_cannot_draw_fails_the_row_only_if_it_counts():
    logits = torch.zeros(6, 8)
    logits[1], logits[4] = torch.nan, torch.nan
    logits[:, 2] = 5.0
    rows = [row_of(0, 0, 1, [2, 2]), row_of(1, 0, 1, [3, 2])]
    sampler = Sampler(2, 8, CPU)
    sampler.start([Request(SamplingParams(temperature=0.0)).start(i) for i in range(2)])
    first, second = sampler.sample(logits, rows)
    assert first == RowResult((2,), failed=True)
    assert second == RowResult((2,))


@pytest.mark.parametrize("garbage", [False, True])
def test_the_distribution_under_a_grammar_is_that_of_masked_sampling(garbage):
    """3 tokens of a small grammar, 20,000 seeds: each answer as often as the chain of masked softmaxes says."""
    model, num = Model(4, True), 20_000
    model.allowed[:, :, 4:] = False
    model.allowed[:, :, :2] = True
    model.logits /= 3
    sampler = Sampler(num, VOCAB, CPU)
    params = SamplingParams(temperature=1.0)
    sampler.start([Request(params, seed=i).start(i) for i in range(num)])
    rng, answers = random.Random(1), [[3] for _ in range(num)]
    while alive := [i for i in range(num) if len(answers[i]) < 4]:
        rows = []
        for i in alive:
            room = 3 - len(answers[i])
            drafts = [rng.randrange(VOCAB if garbage else 2) for _ in range(rng.randint(0, room))]
            rows.append(row_of(i, len(answers[i]) - 1, answers[i][-1], drafts))
        for i, result in zip(alive, sample(sampler, [model] * len(alive), rows, True), strict=True):
            answers[i] += result.tokens
    counts = Counter(tuple(answer[1:]) for answer in answers)
    squares, cells = 0.0, 0
    for answer in product(range(4), repeat=3):
        chance, last = 1.0, 3
        for place, token in enumerate(answer):
            allowed = torch.from_numpy(model.allowed[last, place])
            chance *= float(torch.softmax(model.logits[last, place].where(allowed, -torch.inf), 0)[token])
            last = token
        if chance * num >= 5:
            squares += (counts[answer] - chance * num) ** 2 / (chance * num)
            cells += 1
        else:
            assert counts[answer] <= 20
    assert cells > 5
    assert squares < cells + 5 * (2 * cells) ** 0.5
