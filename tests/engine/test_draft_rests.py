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
from rootgraft.engine.sequence.sequence import Sequence
from rootgraft.engine.speculation.prompt_lookup import NgramIndex
from rootgraft.engine.speculation.proposer import DraftSource, Proposer, _initial_rates
from rootgraft.engine.types import SamplingParams
from rootgraft.radix.namespace import Namespace, Path

WORDS = 50_000


def sequence(number: int, prompt: list[int]) -> Sequence:
    return Sequence(
        number, array("i", prompt), SamplingParams(max_tokens=1000), Path(Namespace("base")), frozenset(), 0, 0.0, 2000
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
    proposer._rates["short_match"].hits = 0.0  # nobody believes a short match
    say(proposer, each, random.Random(3).sample(range(WORDS), 200))
    state = proposer._sequences[1]
    state.rates["short_match"].hits = 0.0
    each.tokens.extend(document[:3])
    state.due = each.num_tokens
    assert not drafts_of(proposer, each)
    state.due = each.num_tokens + 8
    each.tokens.extend(document[3:11])
    drafts = drafts_of(proposer, each)
    assert drafts and drafts == document[11 : 11 + len(drafts)]
    assert state.rates["short_match"].hits == pytest.approx(8)


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
    before = _initial_rates(proposer._rates)["short_match"].value
    document = list(range(100, 140))
    for number in range(100, 140):  # matches that always go on the same way
        say(proposer, sequence(number, [*document, 1, 2, 3]), document)
    assert proposer._rates["short_match"].value > 0.9
    assert _initial_rates(proposer._rates)["short_match"].value == before
    draw = random.Random(5)
    for number in range(400):  # short matches that never go on the same way
        each = sequence(number, [1, 2, 3])
        for _ in range(10):
            say(proposer, each, [*draw.sample(range(10, WORDS), 2), 1, 2, 3])
        proposer.forget(number)
    after = _initial_rates(proposer._rates)["short_match"]
    assert after.value < before / 2
    assert after.trials < 5  # a few hits of its own outweigh that
