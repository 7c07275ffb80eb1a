"""What drafts are guessed from, and at what price: the index of a sequence's tokens, the cost of a step."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.speculation.prompt_lookup import NgramIndex
from rootgraft.engine.speculation.token_cost import TokenCost


def index_of(prompt: list[int], generated: list[int], *, each: bool) -> NgramIndex:
    tokens = array("i", prompt)
    index = NgramIndex(tokens)
    for token in generated:
        tokens.append(token)
        if each:
            index.lookup(4)
    return index


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(0, 2), max_size=40), st.booleans())
def test_a_guess_goes_on_where_the_last_tokens_stood_before(prompt, generated, each):
    tokens = [*prompt, *generated]
    length, guess = index_of(prompt, generated, each=each).lookup(5)
    known = [
        next((n for n in (3, 2, 1) if end >= n and tokens[end - n : end] == tokens[-n:]), 0)
        for end in range(len(tokens))
    ]
    if not any(known):
        assert (length, list(guess)) == (0, [])
        return
    assert max(known) <= length <= 16 and len(guess) == 5
    sources = [end for end in range(1, len(tokens)) if tokens[end - 1] == tokens[-1]]
    endless = [(tokens[end:] * 5)[:5] for end in sources]
    assert list(guess) in endless


@given(st.integers(0, 10**6))
def test_a_copy_is_followed_through_places_that_look_alike(seed):
    """A copy of a text, some tokens in: the guess is what comes next there, however common the last tokens are."""
    rng = random.Random(seed)
    text = [rng.randrange(50) if rng.random() < 0.2 else 7 for _ in range(300)]
    tokens = array("i", [*text, 60, 61])
    index = NgramIndex(tokens)
    right = 0
    for place, token in enumerate(text):
        right += list(index.lookup(1)[1]) == [token]
        tokens.append(token)
        assert place < 300
    assert right > 250


def test_few_tokens_and_large_ids_are_no_trouble():
    for prompt in ([1], [1, 2], [1, 2, 3], [2**31 - 1] * 5):
        index = NgramIndex(array("i", prompt))
        length, guess = index.lookup(3)
        assert list(guess) in ([], prompt[:3])
        assert length <= len(prompt)


def test_a_copy_goes_on_behind_a_token_that_was_replaced():
    """Of all places with the last token, the one is guessed at which the source goes on that the copy has left."""
    row = [[1, 2, 10 + n, 3, 4, 50 + n, 5] for n in range(9)]
    text = [token for each in row for token in each]
    tokens = array("i", [*text, 99])
    index = NgramIndex(tokens)
    for token in text[:9]:
        index.lookup(4)
        tokens.append(token)
    index.lookup(4)
    tokens.extend([77, 3])  # in place of 11
    # One token, and a fourth of the nine that agree before: of all places with a 3 this is the likeliest.
    assert index.lookup(4) == (3, array("i", text[11:15]))


def test_a_period_is_gone_on_with():
    assert list(index_of([9, 1, 2, 3, 1, 2, 3], [], each=False).lookup(8)[1]) == [1, 2, 3, 1, 2, 3, 1, 2]


@given(st.floats(0.1, 50), st.floats(0.01, 2), st.integers(0, 10**6))
def test_the_price_of_a_draft_is_learnt_from_steps_that_differ(base, slope, seed):
    rng, token_cost = random.Random(seed), TokenCost()
    for _ in range(300):
        tokens = rng.randint(1, 60)
        token_cost.observe(tokens, base + slope * tokens)
    for rows in (1, 8, 32):
        assert token_cost.threshold(rows) == pytest.approx(slope / (slope + base / rows), abs=0.16)


def test_before_steps_differ_a_draft_has_a_price_and_one_slow_step_does_not_decide():
    token_cost = TokenCost()
    assert 0 < token_cost.threshold(1) < 0.2
    for _ in range(50):
        token_cost.observe(1, 0.01)
    price = token_cost.threshold(1)
    assert 0.02 < price < 0.2
    token_cost.observe(9, 5.0)
    assert token_cost.threshold(1) < 0.6
    for tokens in (1, 9) * 100:
        token_cost.observe(tokens, 0.01)
    assert token_cost.threshold(1) < 0.02
