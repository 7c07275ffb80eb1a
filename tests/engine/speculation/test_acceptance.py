"""How often the sources of drafts are asked: always as long as it brings something, seldom where it never does."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest
from support.engine.draft_engine import drafts_of

from rootgraft.engine.engine_stats import EngineStats
from rootgraft.engine.json_options import SpeculativeConfig
from rootgraft.engine.kv_cache.prefix_cache import PrefixCache
from rootgraft.engine.sequence.sequence import Sequence, SequenceSpec
from rootgraft.engine.speculation.acceptance import HIGHEST_RATE, AcceptanceRate, AcceptanceRates, chances, observe
from rootgraft.engine.speculation.prompt_lookup import NgramIndex
from rootgraft.engine.speculation.proposer import DraftSource, Proposer
from rootgraft.engine.types import SamplingParams
from rootgraft.radix.namespace import Namespace, Path

WORDS = 50_000


def sequence(number: int, prompt: list[int]) -> Sequence:
    return Sequence(
        number,
        array("i", prompt),
        SamplingParams(max_tokens=1000),
        Path(Namespace("base")),
        SequenceSpec(frozenset(), 0, 0.0, 2000),
    )


@pytest.fixture
def proposer() -> Proposer:
    made = Proposer(SpeculativeConfig(), PrefixCache(20, 4), EngineStats())
    for tokens in range(1, 40):
        made.observe_step(
            1, tokens, 0.01 + 0.001 * tokens, tokens, 0.0
        )  # a draft of one row must be likelier than 1 in 11 to stand
    return made


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long the sequence was each time that its own text was looked through."""
    lengths: list[int] = []
    lookup = NgramIndex.lookup

    def look(self: NgramIndex, limit: int) -> tuple[int, array[int]]:
        lengths.append(len(self._tokens))
        return lookup(self, limit)

    monkeypatch.setattr(NgramIndex, "lookup", look)
    return lengths


def say(proposer: Proposer, each: Sequence, text: Iterator[int] | list[int]) -> int:
    """Let the sequence draw a text, a token a step and one for each draft that stands. Returns the steps it took."""
    text, steps = list(text), 0
    while text:
        drafts = [] if proposer.in_backoff(each) else drafts_of(proposer, each)
        pairs = enumerate(zip(drafts, text, strict=False))
        accepted = next((at for at, (draft, token) in pairs if draft != token), len(drafts))
        drawn, text = text[: accepted + 1], text[accepted + 1 :]
        each.tokens.extend(drawn)
        if drafts:
            proposer.count_accepted(each, len(drafts), len(drawn))
        steps += 1
    return steps


def test_a_text_that_never_repeats_is_looked_through_ever_more_rarely(proposer: Proposer, looks: list[int]) -> None:
    draw = random.Random(1)
    say(proposer, sequence(1, [1, 2, 3]), draw.sample(range(10, WORDS), 300))
    gaps = [after - before for before, after in pairwise(looks)]
    assert gaps == sorted(gaps)
    assert gaps[:3] == [1, 1, 1] and set(gaps) == {1, 2, 4, 8}
    assert len(looks) < 60


def test_a_copy_that_begins_late_is_followed_soon(proposer: Proposer, looks: list[int]) -> None:
    draw = random.Random(2)
    document = draw.sample(range(10, WORDS), 200)
    each = sequence(1, [*document, 1, 2, 3])
    say(proposer, each, draw.sample(range(WORDS, 2 * WORDS), 200))
    assert proposer.in_backoff(each) or looks[-1] >= each.num_tokens - 8
    steps = say(proposer, each, document)
    assert steps < 11 + 200 / 10  # 8 tokens until the next look and three by which a copy is known; then 17 a step


def test_what_a_guess_was_right_in_between_is_counted(proposer: Proposer) -> None:
    """A guess of 16 tokens whose first eight are drawn before the next look has been right eight times, not once."""
    document = list(range(100, 140))
    each = sequence(1, [*document, 1, 2, 3])
    distrust(proposer._rates)
    say(proposer, each, random.Random(3).sample(range(WORDS), 200))
    state = proposer._sequences[1]
    distrust(state.rates)
    each.tokens.extend(document[:3])
    state.due = each.num_tokens
    assert not drafts_of(proposer, each)
    state.due = each.num_tokens + 8
    each.tokens.extend(document[3:11])
    drafts = drafts_of(proposer, each)
    assert drafts and drafts == document[11 : 11 + len(drafts)]
    assert sum(rate.hits for rate in state.rates._matches) == pytest.approx(8)


def distrust(rates: AcceptanceRates) -> None:
    for rate in rates._matches:
        rate.hits = 0.0


def behind_match(rates: AcceptanceRates, length: int) -> AcceptanceRate:
    """The rate of the first draft behind a match of so many tokens."""
    return rates.of_match(length)[0][0]


def test_the_grammar_is_asked_while_the_other_sources_rest(proposer: Proposer, looks: list[int]) -> None:
    forced: list[int] = []
    each = sequence(1, [1, 2, 3])
    each.matcher = SimpleNamespace(draft=lambda limit: forced[:limit], admits=len)  # type: ignore[assignment]
    text = random.Random(4).sample(range(10, WORDS), 100)
    for token in text:
        drafts_of(proposer, each)
        each.tokens.append(token)
    assert len(looks) < 40
    proposer._sequences[1].due = each.num_tokens + 5
    forced = [7, 8, 9]
    assert not proposer.in_backoff(each)
    assert drafts_of(proposer, each) == forced
    assert proposer._sequences[1].used is DraftSource.GRAMMAR
    assert len(looks) < 40


def test_a_new_sequence_begins_with_what_the_others_learnt(proposer: Proposer) -> None:
    before = behind_match(AcceptanceRates(proposer._rates), 3)
    document = list(range(100, 140))
    for number in range(100, 140):  # matches that always go on the same way
        say(proposer, sequence(number, [*document, 1, 2, 3]), document)
    assert behind_match(AcceptanceRates(proposer._rates), 16).value > 0.9
    draw = random.Random(5)
    for number in range(400):  # matches of three tokens that never go on the same way
        each = sequence(number, [1, 2, 3, *draw.sample(range(10, WORDS), 16)])
        for _ in range(4):
            say(proposer, each, [1, 2, 3, *draw.sample(range(10, WORDS), 16)])
        proposer.forget(number)
    after = behind_match(AcceptanceRates(proposer._rates), 3)
    assert after.value < before.value / 2
    assert after.trials < 5  # a few hits of its own outweigh that
    assert behind_match(AcceptanceRates(proposer._rates), 1).value > 0.5, "behind one token they went on the same way"


def test_each_draft_has_the_rate_of_the_match_that_it_would_make() -> None:
    """Behind two tokens: the third draft follows a match of four, and so on; all are counted where they belong."""
    rates = AcceptanceRates()
    runs = rates.of_match(2)
    told = [rate for rate, count in runs for _ in range(min(count, 20))]
    lengths = [2 + place for place in range(20)]
    assert all(rate is behind_match(rates, length) for rate, length in zip(told, lengths, strict=False))
    assert chances(runs, 16) == [rate.value for rate in told[:16]]
    before = [(rate.hits, rate.trials) for rate in rates._matches]
    observe(runs, 4, 5)
    gained = [
        (rate.hits - hits, rate.trials - trials) for rate, (hits, trials) in zip(rates._matches, before, strict=True)
    ]
    assert gained == [(0, 0), (1, 1), (1, 1), (2, 2), (0, 1), (0, 0), (0, 0)]  # 1, 2, 3, 4 to 5, 6 to 8, 9, 16 tokens


def test_no_draft_is_certain() -> None:
    rate = AcceptanceRate(50.0, 50.0)
    assert rate.value == HIGHEST_RATE
    assert 0 < rate.lower_bound < rate.value
