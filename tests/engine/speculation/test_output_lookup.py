"""What other answers said: guesses that are true, apart for each namespace, of bounded memory; and drafts from them."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.draft_engine import compute_all_drafts, drafts_of

from rootgraft.engine.engine_stats import EngineStats
from rootgraft.engine.json_options import SpeculativeConfig
from rootgraft.engine.kv_cache.prefix_cache import PrefixCache
from rootgraft.engine.sequence.sequence import Sequence, SequenceSpec
from rootgraft.engine.speculation.output_lookup import OutputIndex, OutputLookup
from rootgraft.engine.speculation.proposer import Proposer
from rootgraft.engine.types import SamplingParams
from rootgraft.radix.namespace import Namespace, Path

NAMESPACES = [
    Namespace("base"),
    Namespace("base", "adapter"),
    Namespace("base", None, "salt"),
    Namespace("base", tenant="t"),
]


@dataclass
class Said:
    """A sequence as the test knows it."""

    namespace: int
    tokens: array[int]
    index: OutputIndex
    all_tokens: list[int]
    first: int
    num_prompt: int

    @classmethod
    def begin(cls, answers: OutputLookup, namespace: int, prompt: list[int]) -> Said:
        tokens = array("i", prompt)
        index = OutputIndex(answers, NAMESPACES[namespace], tokens, len(prompt))
        return cls(namespace, tokens, index, list(prompt), max(0, len(prompt) - 8), len(prompt))

    def say(self, token: int) -> None:
        self.tokens.append(token)
        self.all_tokens.append(token)

    def goes_on(self, last: list[int], guess: list[int]) -> bool:
        """Whether these tokens stand here, the last of them in what is indexed, and then those of the guess."""
        text = self.all_tokens[self.first :]
        ends = range(max(len(last), self.num_prompt - self.first), len(text) - len(guess) + 1)
        return any(text[end - len(last) : end] == last and text[end : end + len(guess)] == guess for end in ends)


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 1), st.lists(st.integers(0, 2), min_size=1, max_size=12)),
        st.tuples(st.just("say"), st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=6)),
        st.tuples(st.just("guess"), st.integers(0, 5), st.just([])),
        st.tuples(st.just("end"), st.integers(0, 5), st.just([])),
    ),
    max_size=60,
)


@given(MOVES, st.sampled_from([1, 7, 40, 1 << 15]))
def test_a_guess_is_what_another_answer_of_the_namespace_said(moves: list, most: int) -> None:
    answers, said, ended = OutputLookup(most), [], []
    for move, number, tokens in moves:
        if move == "begin":
            said.append(Said.begin(answers, number, tokens))
        elif said:
            mine = said[number % len(said)]
            if move == "say":
                for token in tokens:
                    mine.say(token)
            elif move == "end":
                mine.index.end()
                mine.tokens.extend([9] * 30)  # nobody reads them any more
                said.remove(mine)
                ended.append(mine)
            else:
                check(mine, [each for each in (*said, *ended) if each is not mine and each.namespace == mine.namespace])


def check(mine: Said, others: list[Said]) -> None:
    length, guess = mine.index.lookup(4)
    if not length:
        assert not guess
        return
    assert 3 <= length <= 16 and 1 <= len(guess) <= 4
    last = mine.all_tokens[len(mine.all_tokens) - length :]
    assert any(other.goes_on(last, list(guess)) for other in others)


@given(st.integers(0, 10**6))
def test_a_like_answer_is_followed(seed: int) -> None:
    """One that differs in a token here and there is guessed but for some tokens after each."""
    rng = random.Random(seed)
    answers = OutputLookup()
    text = [rng.randrange(1000) for _ in range(200)]
    first = Said.begin(answers, 0, [rng.randrange(1000) for _ in range(50)] + [1, 2, 3])
    for token in text:
        first.say(token)
    first.index.end()
    second = Said.begin(answers, 0, [rng.randrange(1000) for _ in range(9)] + [1, 2, 3])
    right = 0
    for place, token in enumerate(text):
        said = 5000 + place if place % 40 == 39 else token
        right += list(second.index.lookup(1)[1]) == [said]
        second.say(said)
    assert right >= 200 - 5 * 5


def test_an_answer_in_another_namespace_is_not_known() -> None:
    answers = OutputLookup()
    for number in range(len(NAMESPACES)):
        index = Said.begin(answers, number, [1, 2, 3])
        assert index.index.lookup(4) == (0, array("i"))
        for token in range(10, 20):
            index.say(token)
            assert index.index.lookup(4)[0] == 0
        index.index.end()
        again = Said.begin(answers, number, [1, 2, 3])
        assert again.index.lookup(4) == (3, array("i", [10, 11, 12, 13]))


def test_what_a_sequence_said_itself_is_not_another_answer() -> None:
    alone = Said.begin(OutputLookup(), 0, [1, 2, 3])
    for token in [1, 2, 3] * 5:
        alone.say(token)
        assert alone.index.lookup(4)[0] == 0


def test_little_is_kept() -> None:
    """Of prompts their ends, of answers the last ones; and groups that are kept no longer are forgotten."""
    answers = OutputLookup(most=100)
    for number in range(50):
        each = Said.begin(answers, 0, [number] * 5000)
        for token in range(30):
            each.say(1000 * number + token)
        each.index.end()
    kept = [answer for answer, *_ in answers._entries]
    assert len({id(answer) for answer in kept}) <= 5
    assert all(len(answer.tokens) <= 8 + 30 for answer in kept)
    assert len(kept) == 100
    assert set(answers._latest) == {group for _, _, group, _ in answers._entries}


@given(st.lists(st.integers(-3, 3), max_size=80), st.integers(1, 20))
def test_the_latest_places_of_a_group_are_found(groups: list[int], most: int) -> None:
    answers = OutputLookup(most)
    for place, group in enumerate(groups):
        answers.add(group, Any, place)  # type: ignore[arg-type]
        for asked in range(-3, 4):
            kept = [at for at in range(max(0, place + 1 - most), place + 1) if groups[at] == asked]
            assert [at for _, at in answers.positions(asked)] == kept[::-1][:8]


def sequence(number: int, prompt: list[int], namespace: Namespace = NAMESPACES[0]) -> Sequence:
    params = SamplingParams(max_tokens=50)
    return Sequence(number, array("i", prompt), params, Path(namespace), SequenceSpec(frozenset(), 0, 0.0, 1000))


@pytest.mark.parametrize(
    ("method", "sharing", "namespace", "wanted"),
    [("auto", True, 0, True), ("auto", True, 3, False), ("auto", False, 0, False), ("ngram", True, 0, False)],
)
def test_drafts_come_from_like_answers(
    monkeypatch: pytest.MonkeyPatch, method: str, sharing: bool, namespace: int, wanted: bool
) -> None:
    compute_all_drafts(monkeypatch)
    stats = EngineStats()
    proposer = Proposer(SpeculativeConfig(method), PrefixCache(20, 4, sharing=sharing), stats)
    answer = list(range(100, 130))
    first = sequence(1, [5, 6, 1, 2, 3])
    for token in answer:
        proposer.propose(first, 0, 1)
        first.tokens.append(token)
    proposer.forget(1)
    second = sequence(2, [7, 1, 2, 3], NAMESPACES[namespace])
    drafts = drafts_of(proposer, second)
    assert drafts == answer[: len(drafts)] and bool(drafts) == wanted
    second.tokens.extend(drafts)
    if drafts:
        proposer.count_accepted(second, len(drafts), len(drafts))
    assert ("answer" in stats.draft_stats.drafted) == wanted
