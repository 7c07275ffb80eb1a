"""The string of the fewest tokens, beside all strings that a pattern admits."""

from __future__ import annotations

import random
from itertools import product

import pytest

from rootgraft.grammar.regex.charset import json_string
from rootgraft.grammar.schema.constraints import Strings
from rootgraft.grammar.schema.fewest_tokens import string_of_fewest_tokens
from rootgraft.grammar.schema.string_language import automaton_of
from rootgraft.grammar.vocabulary import Vocabulary

PIECES = ["ba", "ab", "aba", "bb", '"a', '"ab', 'b"', 'bab"', "é", "éa", "xy"]


def vocabulary(rng: random.Random) -> Vocabulary:
    some = [piece.encode() for piece in rng.sample(PIECES, rng.randint(2, len(PIECES)))]
    tokens = (*(bytes((byte,)) for byte in range(256)), *some, b"<end>")
    return Vocabulary(tokens, frozenset((len(tokens) - 1,)), (len(tokens) - 1,))


def strings(rng: random.Random) -> tuple[Strings, list[str]]:
    """A pattern or a length over few letters, and all strings of it."""
    least, letters = rng.randint(2, 5), rng.choice(["ab", "aé", "ba"])
    most = least + rng.randint(0, 2)
    found = ["".join(each) for length in range(least, most + 1) for each in product(letters, repeat=length)]
    if rng.random() < 0.5:
        return Strings(patterns=frozenset([f"^[{letters}]{{{least},{most}}}$"])), found
    return Strings(patterns=frozenset([f"^[{letters}]*$"]), least=least, most=most), found


@pytest.mark.parametrize("seed", range(20))
def test_no_string_takes_fewer_tokens(seed):
    rng = random.Random(seed)
    tokens, (constraints, listed) = vocabulary(rng), strings(rng)
    automaton = automaton_of(constraints)
    assert automaton is not None
    found = string_of_fewest_tokens(automaton, tokens)
    assert found in listed
    counts = {text: len(tokens.fewest(json_string(text).encode())) for text in listed}
    assert counts[found] == min(counts.values())


def test_a_string_that_does_not_end_within_the_steps_is_not_found(monkeypatch):
    monkeypatch.setattr("rootgraft.grammar.schema.fewest_tokens.MAX_STEPS", 300)
    automaton = automaton_of(Strings(least=9))
    assert automaton is not None and string_of_fewest_tokens(automaton, vocabulary(random.Random(0))) is None
