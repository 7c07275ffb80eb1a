"""Drafts over the end of a thought leave no trace, wherever they try to end it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats

from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.match.mask_buffer import MaskBuffer, MaskFill
from rootgraft.grammar.match.reasoning_matcher import ReasoningMatcher
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.thought_rules import ThoughtRules
from rootgraft.grammar.vocabulary import Vocabulary

SPECS = [
    GrammarSpec.json_schema(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    ),
    GrammarSpec.json_schema({"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2}),
    GrammarSpec.regex("[a-f]{2,5}-[0-9]+"),
]
RULES = [
    ThoughtRules("[t]", "[e]", is_open=True, newlines=2),
    ThoughtRules("[t]", "[e]", is_open=False, newlines=2),
    ThoughtRules("[t]", "[e]", is_open=True, budget=6, newlines=1),
    ThoughtRules("[t]", "[e]", is_open=True, lead="<a>"),
]


@pytest.fixture(scope="module")
def compiled(vocabulary) -> list[CompiledGrammar]:
    return [compile(spec, vocabulary) for spec in SPECS]


@settings(max_examples=repeats(30))
@given(st.integers(0, len(SPECS) - 1), st.integers(0, len(RULES) - 1), st.integers(0, 10**6), st.integers(0, 30))
def test_masks_along_drafts_that_end_a_thought_are_those_of_a_replay(compiled, vocabulary, number, rules, seed, spare):
    rng = random.Random(seed)
    matcher, plain = (ReasoningMatcher(vocabulary, RULES[rules], compiled[number].matcher()) for _ in range(2))
    budget = plain.num_shortest + 8 + spare
    buffer, plain_buffer = MaskBuffer(8, vocabulary), MaskBuffer(1, vocabulary)
    while not plain.is_done and plain.num_tokens < budget:
        start, remaining = plain.num_tokens, budget - plain.num_tokens
        drafts = _drafts(rng, matcher, vocabulary, min(7, remaining - 1))
        assert not buffer.fill([MaskFill(0, matcher, remaining, drafts)])
        for ahead in range(len(drafts) + 1):
            assert not plain_buffer.fill([MaskFill(0, plain, remaining - ahead)])
            assert (buffer.words[ahead] == plain_buffer.words[0]).all()
            allowed = _tokens(plain_buffer.words[0])
            check, plain_check = buffer.checks.get(ahead), plain_buffer.checks.get(0)
            assert (check is None) == (plain_check is None)
            if check is not None and plain_check is not None:
                assert (check.known() == plain_check.known()).all()
                some = rng.sample(allowed, min(5, len(allowed)))
                assert all(check.costs(token) == plain_check.costs(token) for token in some)
                allowed = sorted({*allowed} & {*_tokens(plain_check.limits())})
            stands = ahead < len(drafts) and drafts[ahead] in allowed and rng.random() < 0.7
            token = drafts[ahead] if stands else _drawn(rng, allowed)
            assert plain.accept(token)
            if ahead == len(drafts) or token != drafts[ahead]:
                break
        matcher.rollback(matcher.num_tokens - start - (plain.num_tokens - start - 1))
        assert matcher.accept(token)
        assert (matcher.num_tokens, matcher.is_whole, matcher.is_done) == (
            plain.num_tokens,
            plain.is_whole,
            plain.is_done,
        )
    assert plain.is_done or plain.is_whole


def _drawn(rng: random.Random, allowed: list[int]) -> int:
    """Return any token, those of a mark and blanks more often."""
    likely = [token for token in allowed if token in {*b"[]e \n"}]
    return rng.choice(likely if likely and rng.random() < 0.5 else allowed)


def _drafts(rng: random.Random, matcher: ReasoningMatcher, vocabulary, most: int) -> list[int]:
    """What is forced, or a thought that ends early or late and what follows it; as much as is admitted."""
    if rng.random() < 0.3:
        return matcher.draft(most)
    text = b"on a"[: rng.randrange(5)] + rng.choice([b"[e]", b"e]", b"", b'{"name": "ab', b'["red"', b"abc-1"])
    found = vocabulary.tokenize(text)[:most]
    return found[: matcher.admits(found)]


def _tokens(words: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


MARK_SPECS = [
    GrammarSpec.regex(r"(.|\n)*"),
    GrammarSpec.regex(r"[\[te]x?.*"),
    GrammarSpec.choice(["[t]x[e]yz", "[t][e]", "[tx", "yes"]),
]
PIECES = b"[t]", b"[e]", b"[t", b"[", b"t]", b"e]", b"[e", b"]", b"x", b"y", b" ", b"\n", b"yes"


def _marked_vocabulary(rng: random.Random) -> Vocabulary:
    """Every byte, and tokens of several pieces of marks and text; the marks may be special tokens."""
    longer = {b"".join(rng.choices(PIECES, k=rng.randint(2, 5))) for _ in range(8)}
    special = [b"[t]", b"[e]"] if rng.random() < 0.5 else []
    texts = [b"[t][e]", *sorted(longer - {*special, b"[t][e]"})]
    tokens = [*(bytes([byte]) for byte in range(256)), *texts, *special, b"</s>"]
    end = len(tokens) - 1
    return Vocabulary(tuple(tokens), frozenset(range(end - len(special), end + 1)), (end,))


def _seen(matcher: ReasoningMatcher, row: np.ndarray) -> tuple[object, ...]:
    """Return all that can be asked of a matcher."""
    matcher.fill_mask(row)
    state = matcher.num_tokens, matcher.is_whole, matcher.is_done, matcher.may_go_on, matcher.may_draft
    return (*state, matcher.num_shortest, tuple(matcher.draft(8)), row.tobytes())


@pytest.mark.parametrize("seed", range(repeats(18)))
def test_what_is_not_accepted_changes_nothing_and_what_is_allowed_is_accepted(seed: int) -> None:
    """Whatever tokens hold: both marks and text, parts of marks, marks in the middle."""
    rng = random.Random(seed)
    vocabulary = _marked_vocabulary(rng)
    rules = ThoughtRules("[t]", "[e]", is_open=rng.random() < 0.3, budget=rng.choice([None, 2]), newlines=1)
    compiled = compile(rng.choice(MARK_SPECS), vocabulary)
    row, texts = np.zeros(vocabulary.num_words, np.int32), range(256, len(vocabulary.tokens))
    for _ in range(4):
        matcher = ReasoningMatcher(vocabulary, rules, compiled.matcher())
        drawn: list[int] = []
        while len(drawn) < 6 and not matcher.is_done:
            before = _seen(matcher, row)
            allowed = _tokens(row)
            taken = []
            for token in {*texts, *b"[]tex\n ", *rng.sample(allowed, min(4, len(allowed)))}:
                if matcher.accept(token):
                    taken.append(token)
                    matcher.rollback(1)
                else:
                    assert token not in allowed
                assert _seen(matcher, row) == before
                admitted = matcher.admits([token, *rng.choices(texts, k=2)])
                assert not admitted or token in taken
                assert _seen(matcher, row) == before
            likely = [token for token in taken if token in texts] or taken
            drawn.append(rng.choice(likely if rng.random() < 0.7 else taken))
            assert matcher.accept(drawn[-1])
            again = ReasoningMatcher(vocabulary, rules, compiled.matcher())
            assert all(again.replay(token, 100) for token in drawn)
            assert _seen(again, row) == _seen(matcher, row)
