"""A matcher's state is that of its tokens, whatever was tried and taken back on the way: drafts leave no trace."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grammar.schema_cases import SCHEMAS
from support.machine.thoroughness import repeats

from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.emit.grammar_artifact import Backend, GrammarArtifact
from rootgraft.grammar.match.backends import LlguidanceBackend
from rootgraft.grammar.match.mask_buffer import MaskBuffer, MaskFill
from rootgraft.grammar.match.matcher import GrammarFailure
from rootgraft.grammar.spec import GrammarSpec

SPECS = [
    *(GrammarSpec.json_schema(schema) for schema in SCHEMAS),
    GrammarSpec.regex("[a-f]{2,5}-(long constant|lon)+[0-9]?"),
    GrammarSpec.ebnf('root ::= "abc" ("d" | "ef" root)'),
]
BUDGET = 60


@pytest.fixture(scope="module")
def compiled(vocabulary) -> list[CompiledGrammar]:
    return [compile(spec, vocabulary) for spec in SPECS]


@settings(max_examples=repeats(50))
@given(st.integers(0, len(SPECS) - 1), st.integers(0, 10**6), st.integers(0, 30))
def test_masks_along_drafts_are_those_of_a_replay(compiled, vocabulary, number, seed, spare):
    """Right drafts, absurd ones and refused ones, filled along, kept in part: every mask is the one without drafts."""
    rng = random.Random(seed)
    budget = (compiled[number].matcher().num_shortest or 10) + 1 + spare
    buffer, plain_buffer = MaskBuffer(8, vocabulary), MaskBuffer(1, vocabulary)
    matcher, plain = compiled[number].matcher(), compiled[number].matcher()
    while not plain.is_done and plain.num_tokens < budget:
        drafts = _drafts(rng, matcher, vocabulary, budget - plain.num_tokens - 1)
        assert not buffer.fill([MaskFill(0, matcher, budget - plain.num_tokens, drafts)])
        start = plain.num_tokens
        for ahead in range(len(drafts) + 1):
            plain_buffer.fill([MaskFill(0, plain, budget - plain.num_tokens)])
            assert (buffer.words[ahead] == plain_buffer.words[0]).all()
            assert (ahead in buffer.checks) == (0 in plain_buffer.checks)
            allowed = _tokens(plain_buffer.words[0])
            if (check := plain_buffer.checks.get(0)) is not None:
                fits = {token: check.fits(token) for token in allowed}
                some = [*rng.sample(allowed, min(5, len(allowed))), *drafts[ahead : ahead + 1]]
                some = [token for token in some if token in fits]
                assert all(buffer.checks[ahead].fits(token) == fits[token] for token in some)
                # What the sampler goes by when its draws have cost too much, too.
                assert all(buffer.checks[ahead].costs(token) == check.costs(token) for token in some)
                assert (buffer.checks[ahead].known() == check.known()).all()
                allowed = [token for token in allowed if fits[token]]
            stands = ahead < len(drafts) and drafts[ahead] in allowed and rng.random() < 0.8
            token = drafts[ahead] if stands else rng.choice(allowed)
            assert plain.accept(token)
            if ahead == len(drafts) or token != drafts[ahead]:
                break
        matcher.rollback(matcher.num_tokens - start - (plain.num_tokens - start - 1))
        assert matcher.accept(token)
        assert (matcher.num_tokens, matcher.can_end, matcher.is_done) == (
            plain.num_tokens,
            plain.can_end,
            plain.is_done,
        )
    assert plain.is_done or plain.can_end


def _drafts(rng: random.Random, matcher, vocabulary, most: int) -> list[int]:
    """What the grammar forces, what it might admit, and anything at all; at most 7."""
    kind = rng.randrange(4)
    if kind == 0:
        found = matcher.draft(7)
    elif kind == 1:
        found = vocabulary.tokenize(
            rng.choice([b'{"name": "ab"', b"long constant", b'"2020-01-01"', b"abcefabc", b"123"])
        )
    elif kind == 2:
        walk, found = matcher.copy(), []
        for _ in range(rng.randint(0, 7)):
            if walk.is_done:
                break
            walk.fill_mask(row := np.zeros(vocabulary.num_words, np.int32))
            found.append(rng.choice(_tokens(row)))
            assert walk.accept(found[-1])
    else:
        found = [rng.randrange(vocabulary.size) for _ in range(rng.randint(0, 4))]
    # An end is never drafted: nothing could come behind it.
    end = next((at for at, token in enumerate(found) if token in vocabulary.eos), 7)
    found = found[: max(0, min(end, 7, most))]
    return found[: matcher.admits(found)] if rng.random() < 0.8 else found


def _tokens(words: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def test_what_is_admitted_stops_at_an_end_and_changes_nothing(compiled, vocabulary):
    matcher = compile(GrammarSpec.regex("ab?"), vocabulary).matcher()
    a, b = ord("a"), ord("b")
    assert matcher.admits([a, b, vocabulary.eos[0]]) == 2
    assert matcher.admits([a, vocabulary.eos[0]]) == 1
    assert matcher.admits([b, a]) == 0
    assert matcher.num_tokens == 0 and matcher.admits([a, b]) == 2


# Repeats in repeats: after some hundred letters the lexer has more states than it may.
FRAGILE = GrammarArtifact(Backend.LLGUIDANCE, "start: /(x{0,1000}){0,1000}(y{0,1000}){0,1000}z/")
XS = [ord("x")] * 390


def test_a_refused_draft_costs_no_mask(grammars, monkeypatch):
    matcher = grammars.schema({"type": "array", "items": {"const": "abc"}, "minItems": 3}).matcher()
    assert all(map(matcher.accept, grammars.vocabulary.tokenize(b'["a')))
    fills = []
    inner = LlguidanceBackend.fill
    monkeypatch.setattr(LlguidanceBackend, "fill", lambda state, row: fills.append(1) or inner(state, row))
    assert matcher.admits(grammars.vocabulary.tokenize(b"bx")) == 1 and not fills
    assert not matcher.accept(*grammars.vocabulary.tokenize(b"x")) and fills, "a limit may be the reason"


@pytest.mark.usefixtures("hardly_larger_limits")
def test_a_library_that_fails_along_a_draft_is_as_before_when_the_draft_is_taken_back(vocabulary):
    """llguidance takes nothing back once it has failed; the matcher then starts again and reads its tokens anew."""
    matcher = CompiledGrammar(FRAGILE, vocabulary).matcher()
    buffer = MaskBuffer(400, vocabulary)
    [failed] = failures = buffer.fill([MaskFill(0, matcher, None, XS)])
    assert isinstance(failures[failed], GrammarFailure) and not buffer.words[failed:391].any()
    assert matcher.failure and matcher.num_tokens > 0
    matcher.rollback(matcher.num_tokens)
    assert matcher.failure is None and matcher.num_tokens == 0 and not matcher.can_end
    assert matcher.admits(XS) == 0, "no more drafts: each would have the state made again"
    assert not matcher.draft(9)
    assert not buffer.fill([MaskFill(0, matcher)])
    assert set(_tokens(buffer.words[0])) == set(b"xyz")


@pytest.mark.usefixtures("hardly_larger_limits")
def test_answers_beside_one_that_makes_the_library_fail_go_on(vocabulary):
    """A lexer that has failed stays so in every copy of its state; the fault must end the one answer only."""
    compiled = CompiledGrammar(FRAGILE, vocabulary)
    beside, failing = compiled.matcher(), compiled.matcher()
    buffer = MaskBuffer(400, vocabulary)
    assert beside.accept(ord("x")) and not compiled.has_failed
    assert buffer.fill([MaskFill(0, failing, None, XS)])
    assert compiled.has_failed
    copied = beside.copy()
    for matcher in (beside, copied):
        assert not buffer.fill([MaskFill(0, matcher, None, b"xyy")])
        assert set(_tokens(buffer.words[3])) == set(b"yz")
        assert matcher.accept(ord("z")) and matcher.can_end


def test_ids_that_are_no_tokens_are_refused_and_break_nothing(compiled, vocabulary):
    """A row of logits may be wider than the vocabulary."""
    matcher = compiled[0].matcher()
    assert matcher.admits([len(vocabulary.tokens)]) == 0
    assert not matcher.accept(vocabulary.size - 1)
    assert matcher.failure is None
    assert matcher.accept(ord("{"))
