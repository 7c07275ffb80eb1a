"""Matchers: masks agree with accept, rollback undoes, budgets close, failures are not ends."""

from __future__ import annotations

import json
import random
from itertools import count
from types import SimpleNamespace

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grammar.schema_cases import SCHEMAS
from support.machine.thoroughness import repeats

from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.emit.grammar_artifact import Backend, GrammarArtifact
from rootgraft.grammar.match import mask_buffer
from rootgraft.grammar.match.budget_close import BudgetClose
from rootgraft.grammar.match.closing_texts import ClosingTexts
from rootgraft.grammar.match.completion_search import CompletionSearch
from rootgraft.grammar.match.mask_buffer import MaskBuffer, MaskFill
from rootgraft.grammar.match.matcher import GrammarFailure, Matcher
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary


def state_of(grammars, matcher: Matcher) -> tuple[set[int], bool, bool]:
    return grammars.allowed(matcher), matcher.can_end, matcher.is_done


@settings(max_examples=repeats(40))
@given(st.sampled_from(SCHEMAS), st.integers(0, 10**6), st.lists(st.integers(0, 6), max_size=12))
def test_rollback_and_replay_lead_to_the_same_state(grammars, schema, seed, steps):
    """Forward some tokens, back some of them, and so on: the state is that of a fresh matcher on the same tokens."""
    rng = random.Random(seed)
    compiled = grammars.schema(schema)
    matcher, tokens = compiled.matcher(), []
    for step in steps:
        for _ in range(0 if matcher.is_done else step):
            token = rng.choice(sorted(grammars.allowed(matcher)))
            assert matcher.accept(token)
            tokens.append(token)
            if matcher.is_done:
                break
        back = rng.randint(0, min(len(tokens), 3))
        matcher.rollback(back)
        del tokens[len(tokens) - back :]
        fresh = compiled.matcher()
        assert all(map(fresh.accept, tokens))
        assert state_of(grammars, matcher) == state_of(grammars, fresh) == state_of(grammars, matcher.copy())
        assert matcher.num_tokens == len(tokens)


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("spare", [0, 1, 5, 40])
def test_an_answer_is_complete_whenever_its_shortest_form_fits(grammars, schema, spare):
    compiled = grammars.schema(schema)
    for seed in range(3):
        shortest = compiled.matcher().num_shortest
        assert shortest
        text = grammars.draw(compiled.matcher(), random.Random(seed), max(1, shortest + spare))
        assert text is not None
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


def test_closing_survives_rollback(grammars):
    compiled = grammars.schema({"type": "integer"})
    rng = random.Random(1)
    for _ in range(10):
        matcher, left = compiled.matcher(), 40
        while left and not matcher.is_done:
            assert matcher.accept(rng.choice(sorted(grammars.allowed(matcher, left))))
            left -= 1
            if left and rng.random() < 0.3:
                matcher.rollback(1)
                left += 1
        assert matcher.can_end


@settings(max_examples=25)
@given(schema=st.sampled_from(SCHEMAS), seed=st.integers(0, 2**32), budget=st.sampled_from([3, 12, 60, None]))
def test_a_mask_filled_ahead_is_the_one_filled_when_asked_for(grammars, vocabulary, schema, seed, budget):
    """Along a walk with tokens taken back, and with another budget than was thought."""
    rng = random.Random(seed)
    matcher = grammars.schema(schema).matcher()
    ahead, plain = (np.zeros(vocabulary.num_words, dtype=np.int32) for _ in range(2))
    for _ in range(25):
        left = None if budget is None else budget - matcher.num_tokens
        if matcher.is_done or left == 0:
            break
        if rng.random() < 0.7:
            matcher.prepare(left)
            assert matcher.draft(5) == [] and matcher.admits([ord("1"), ord("2")]) == 0
        asked = left if left is None or rng.random() < 0.8 else left + 1
        expected = matcher.copy()
        matcher.fill_mask(ahead, asked)
        expected.fill_mask(plain, asked)
        assert (ahead == plain).all()
        bits = np.flatnonzero(np.unpackbits(ahead.view(np.uint8), bitorder="little"))
        assert matcher.accept(int(rng.choice(bits)))
        if rng.random() < 0.2:
            matcher.rollback(rng.randint(1, matcher.num_tokens))


def test_masks_that_took_long_are_expected_to_again(grammars, vocabulary, monkeypatch):
    row = np.zeros(vocabulary.num_words, dtype=np.int32)
    matcher = grammars.schema({"type": "string"}).matcher()
    matcher.fill_mask(row, 1_000)
    assert matcher.accept(ord('"')) and not matcher.is_slow(999)
    monkeypatch.setattr("rootgraft.grammar.match.matcher.SLOW_SECONDS", -1.0)
    matcher.fill_mask(row, 999)
    assert matcher.accept(ord("a")) and matcher.is_slow(998)
    assert matcher.copy().is_slow(998)
    monkeypatch.setattr("rootgraft.grammar.match.matcher.SLOW_SECONDS", 1_000.0)
    matcher.fill_mask(row, 998)
    assert matcher.accept(ord("a")) and not matcher.is_slow(997)


def test_time_in_which_other_threads_have_the_core_makes_no_mask_slow(grammars, vocabulary, monkeypatch):
    row = np.zeros(vocabulary.num_words, dtype=np.int32)
    matcher = grammars.schema({"type": "string"}).matcher()
    clock = "rootgraft.grammar.match.matcher.time"
    monkeypatch.setattr(clock, SimpleNamespace(perf_counter=count(1.0, 9.0).__next__, thread_time=lambda: 5.0))
    matcher.fill_mask(row, 1_000)
    assert matcher.accept(ord('"')) and not matcher.is_slow(999)
    monkeypatch.setattr(clock, SimpleNamespace(perf_counter=lambda: 5.0, thread_time=count(1.0, 9.0).__next__))
    matcher.fill_mask(row, 999)
    assert matcher.accept(ord("a")) and matcher.is_slow(998)


def test_an_end_that_was_looked_for_in_vain_is_not_looked_for_again_at_once(vocabulary, monkeypatch):
    searched: list[int] = []

    def search(self: CompletionSearch, state: object, lexical: int, most: int) -> None:
        searched.append(most)

    monkeypatch.setattr(CompletionSearch, "shortest", search)
    row = np.zeros(vocabulary.num_words, dtype=np.int32)
    for search_failed, times in ((False, 2), (True, 1)):
        searched.clear()
        artifact = GrammarArtifact(Backend.LLGUIDANCE, "start: /[^a]{500}a/", search_failed=search_failed)
        matcher = CompiledGrammar(artifact, vocabulary).matcher()
        for left in range(16, 0, -1):
            matcher.fill_mask(row, left)
            assert matcher.accept(ord("x"))
        assert len(searched) == times


def test_a_refused_token_changes_nothing(grammars, vocabulary):
    matcher = grammars.schema(SCHEMAS[0]).matcher()
    before = state_of(grammars, matcher)
    for token in (ord("x"), vocabulary.eos[0], vocabulary.size + 5, -1, *vocabulary.special):
        assert not matcher.accept(token)
    assert state_of(grammars, matcher) == before
    assert matcher.num_tokens == 0


def test_an_end_is_an_accepted_token_that_can_be_taken_back(grammars, vocabulary):
    matcher = grammars.schema({"const": 1}).matcher()
    assert matcher.accept(ord("1"))
    assert grammars.allowed(matcher) == set(vocabulary.eos)
    assert matcher.accept(vocabulary.eos[1])
    assert matcher.is_done
    assert matcher.num_tokens == 2
    assert not matcher.accept(vocabulary.eos[1])
    matcher.rollback(1)
    assert not matcher.is_done
    assert matcher.can_end
    with pytest.raises(ValueError, match="cannot take back 5 of 1"):
        matcher.rollback(5)


def test_a_special_token_is_never_text(grammars, vocabulary):
    matcher = grammars.schema({"type": "string"}).matcher()
    assert matcher.accept(ord('"'))
    assert not grammars.allowed(matcher) & vocabulary.special
    assert max(grammars.allowed(matcher)) < len(vocabulary.tokens)


@pytest.mark.usefixtures("hardly_larger_limits")
def test_a_failed_state_is_a_failure_and_not_an_end(grammars, vocabulary):
    """`a{100000000}` passes a library's own compile and fails in the middle, with larger limits a little later."""
    matcher = CompiledGrammar(
        GrammarArtifact(Backend.LLGUIDANCE, "start: /(x{0,1000}){0,1000}(y{0,1000}){0,1000}z/"), vocabulary
    ).matcher()
    row = np.zeros(vocabulary.num_words, dtype=np.int32)
    with pytest.raises(GrammarFailure):
        for _ in range(10_000):
            matcher.fill_mask(row)
            assert not matcher.can_end
            matcher.accept(ord("x"))
    assert matcher.failure
    assert not matcher.can_end
    assert not matcher.accept(vocabulary.eos[0])


def test_drafts_are_what_must_come_next(grammars, vocabulary):
    compiled = grammars.schema({"const": "forced text"})
    matcher = compiled.matcher()
    draft = matcher.draft(100)
    text = b"".join(vocabulary.tokens[token] for token in draft)
    assert b'"forced text"'.startswith(text)
    assert len(text) > 8
    assert all(map(matcher.copy().accept, draft))
    assert matcher.draft(2) == draft[:2]
    assert matcher.num_tokens == 0


@pytest.mark.parametrize("eos", [(257,), (257, 256), (256, 300, 257), (5, 200)])
def test_an_end_is_forced_whichever_token_makes_it(eos: tuple[int, ...]) -> None:
    """Several end tokens end an answer alike: where nothing else may follow the first of them is taken."""
    tokens = tuple(bytes([token % 256]) for token in range(310))
    buffer = MaskBuffer(1, Vocabulary(tokens, frozenset(eos), eos))

    def forced(*allowed: int) -> int | None:
        buffer.words[0] = 0
        for token in allowed:
            buffer.words[0].view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
        return buffer.forced(0)

    assert forced(*eos) == eos[0]
    assert [forced(token) for token in eos] == list(eos)
    assert forced(*eos, 7) is None and forced(*eos, 255) is None and forced(7, 255) is None
    assert forced(7) == 7 and forced(31) == 31 and forced() is None
    if len(eos) > 2:
        assert forced(*eos[1:]) == eos[1]


@pytest.mark.parametrize("width", [274, 288, 289, 320, 1000])
def test_logits_may_be_much_wider_than_the_vocabulary(grammars, vocabulary, width):
    """By less than a word of the mask or by many, as models pad them: the masks hold the same tokens."""
    wide = type(grammars)(Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos, width))
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "<b>"}
    specs = (
        GrammarSpec.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        GrammarSpec.json_schema({"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$", "maxLength": 500}),
        GrammarSpec.regex("[a-z]{1,9}"),
        GrammarSpec.ebnf('root ::= "x" [0-9]+'),
        GrammarSpec.structural_tag({"format": tag}),
    )
    for spec in specs:
        compiled, as_known = compile(spec, wide.vocabulary), compile(spec, vocabulary)
        for seed in range(3):
            text = wide.draw(compiled.matcher(), random.Random(seed), 60)
            assert text == grammars.draw(as_known.matcher(), random.Random(seed), 60)
            assert text is not None


def test_rows_of_a_batch(vocabulary):
    number = compile(GrammarSpec.json_schema({"const": 7}), vocabulary)
    broken = number.matcher()
    broken.fill_grammar_mask = _fail  # type: ignore[method-assign]
    buffer = MaskBuffer(4, vocabulary)
    failures = buffer.fill([MaskFill(0, number.matcher()), MaskFill(2, broken), MaskFill(3, number.matcher(), 10)])
    assert list(failures) == [2]
    assert buffer.forced(0) == buffer.forced(3) == ord("7")
    assert buffer.forced(1) is None
    assert not buffer.words[2].any()
    assert (buffer.words[1] == -1).all()


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), budget=st.none() | st.integers(1, 60))
def test_rows_that_are_filled_together_are_those_filled_alone(grammars, vocabulary, seed, budget):
    """Of answers anywhere, ended ones and a failed one too; what follows is as if none had been filled together."""
    rng = random.Random(seed)
    pairs = [(matcher := grammars.schema(rng.choice(SCHEMAS)).matcher(), matcher.copy()) for _ in range(12)]
    together, alone = MaskBuffer(24, vocabulary, num_threads=2), MaskBuffer(24, vocabulary)
    for _ in range(10):
        jobs, lengths = [], [matcher.num_tokens for matcher, _ in pairs]
        for index, (matcher, _) in enumerate(pairs):
            draft = [rng.randrange(len(vocabulary.tokens))] if rng.random() < 0.3 else []
            jobs.append(MaskFill(2 * index, matcher, budget, draft))
        together.fill_together(jobs)
        failures = together.fill(jobs)
        expected = alone.fill([job._replace(matcher=other) for job, (_, other) in zip(jobs, pairs, strict=True)])
        assert failures.keys() == expected.keys()
        assert (together.words == alone.words).all() and together.checks.keys() == alone.checks.keys()
        for before, (matcher, other) in zip(lengths, pairs, strict=True):
            matcher.rollback(matcher.num_tokens - before)
            other.rollback(other.num_tokens - before)
        for index, (matcher, other) in enumerate(pairs):
            allowed = np.flatnonzero(np.unpackbits(together.words[2 * index].view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed)) if len(allowed) else -1
            assert matcher.accept(token) == other.accept(token)


def test_a_failure_of_the_rows_filled_together_is_that_of_one_answer(grammars, vocabulary, monkeypatch):
    """The library fails for all where one parser fails; that row alone then has no mask, and the others have theirs."""
    compiled = grammars.schema({"const": 7})
    broken, *others = [compiled.matcher() for _ in range(9)]
    monkeypatch.setattr(broken, "fill_grammar_mask", _fail)
    jobs = [MaskFill(row, matcher) for row, matcher in enumerate((broken, *others))]
    calls = []

    class Executor:
        def __init__(self, num_threads):
            pass

        def unsafe_compute_mask_ptr(self, parsers, address, width, rows):
            buffer.words[:] = 0x55555555
            calls.append(len(parsers))
            raise ValueError("the parser of one row")

    monkeypatch.setattr(llguidance, "LLExecutor", Executor)
    buffer = MaskBuffer(9, vocabulary, num_threads=2)
    for step in range(2):
        buffer.fill_together(jobs)
        assert list(buffer.fill(jobs)) == [0] and calls == [9] * (step + 1)
        assert not buffer.words[0].any()
        assert {buffer.forced(row) for row in range(1, 9)} == {ord("7")}


def test_a_row_that_takes_long_is_found_among_those_filled_together(grammars, vocabulary, monkeypatch):
    """The step after a slow one fills each row alone, and the matcher that was slow is left out from then on."""
    compiled = grammars.schema({"type": "integer"})
    slow, *others = [compiled.matcher() for _ in range(9)]
    buffer = MaskBuffer(9, vocabulary, num_threads=2)
    jobs = [MaskFill(row, matcher) for row, matcher in enumerate((slow, *others))]
    monkeypatch.setattr(mask_buffer, "SLOW_SECONDS", -1.0)
    buffer.fill_together(jobs)
    buffer.fill(jobs)
    asked = []
    monkeypatch.setattr(Matcher, "parser_to_fill", lambda matcher: asked.append(matcher))
    buffer.fill_together(jobs)
    assert not asked
    buffer.fill_together(jobs)
    assert len(asked) == 9
    monkeypatch.undo()
    slow._slow_masks = True
    assert slow.parser_to_fill() is None and others[0].parser_to_fill() is not None


@settings(max_examples=15)
@given(schema=st.sampled_from(SCHEMAS), seed=st.integers(0, 2**32), spare=st.none() | st.integers(0, 30))
def test_masks_along_drafts_are_those_of_one_token_after_another(grammars, vocabulary, schema, seed, spare):
    """Each draft leaves the next one a token less; behind one that is refused nothing is allowed."""
    rng, walk = random.Random(seed), grammars.schema(schema).matcher()
    budget = None if spare is None else (walk.num_shortest or 1) + spare
    rows: list[np.ndarray] = []
    limits: dict[int, np.ndarray] = {}
    drafts: list[int] = []
    while True:
        rows.append(np.zeros(vocabulary.num_words, dtype=np.int32))
        check = walk.fill_grammar_mask(rows[-1], None if budget is None else budget - len(drafts))
        fitting = rows[-1]
        if check is not None:
            fitting = limits[len(drafts) + 1] = check.limits()
        if len(drafts) == 15 or walk.is_done or budget == len(drafts) + 1:
            break
        drafts.append(int(rng.choice(np.flatnonzero(np.unpackbits(fitting.view(np.uint8), bitorder="little")))))
        assert walk.accept(drafts[-1])

    def filled(tokens: list[int]) -> np.ndarray:
        nonlocal buffer
        buffer = MaskBuffer(18, vocabulary)
        assert buffer.fill([MaskFill(1, grammars.schema(schema).matcher(), budget, tokens)]) == {}
        assert (buffer.words[0] == -1).all() and (buffer.words[len(tokens) + 2 :] == -1).all()
        return buffer.words[1 : len(tokens) + 2]

    buffer = None
    assert (filled(drafts) == rows).all()
    assert buffer.checks.keys() == limits.keys()
    assert all((buffer.checks[row].limits() == limit).all() for row, limit in limits.items())
    if drafts:
        at = rng.randrange(len(drafts))
        bits = np.unpackbits(rows[at].view(np.uint8), count=len(vocabulary.tokens), bitorder="little")
        refused = int(rng.choice(np.flatnonzero(bits == 0)))
        if not _follower(grammars.schema(schema).matcher(), drafts[:at]).accept(refused):  # a budget alone refuses some
            some = filled([*drafts[:at], refused, *drafts[at + 1 :]])
            assert (some[: at + 1] == rows[: at + 1]).all() and not some[at + 1 :].any()


def _follower(matcher: Matcher, tokens: list[int]) -> Matcher:
    for token in tokens:
        assert matcher.accept(token)
    return matcher


def _fail(row: np.ndarray, remaining: int | None = None) -> None:
    raise GrammarFailure("too complex")


class _Failing:
    """A state whose library fails at the first token that it is asked about, and then cannot go back."""

    def __init__(self) -> None:
        self.failed = False

    def fill(self, row) -> None:
        row[:] = -1

    def accept(self, token: int) -> bool:
        self.failed = True
        return False

    def advance(self, tokens: list[int]) -> int:
        self.failed = True
        return 0

    def rollback(self, count: int) -> None:
        raise ValueError("cannot take back tokens: too many expressions")

    def copy(self) -> _Failing:
        return self

    def search_copy(self) -> _Failing:
        return self

    def can_end(self) -> bool:
        return False

    def failure(self) -> str | None:
        return "too many expressions" if self.failed else None

    def forced(self) -> bytes:
        return b""

    def string_end(self) -> bytes:
        return b""


def test_a_library_that_fails_in_a_search_for_an_end_ends_nothing_else(vocabulary):
    artifact = GrammarArtifact(Backend.LLGUIDANCE, "", values=("abc", "d"), is_json=True)
    closer = BudgetClose(ClosingTexts(vocabulary, artifact))
    everything = np.full(vocabulary.num_words, -1, dtype=np.int32)
    assert closer.check(_Failing(), everything, 50) is None
    rebuilt: list[_Failing] = []

    def rebuild() -> _Failing:
        rebuilt.append(_Failing())
        return rebuilt[-1]

    Matcher(_Failing(), vocabulary, closer.copy(), rebuild).fill_mask(np.zeros(vocabulary.num_words, np.int32), 50)


def test_whatever_a_library_raises_is_the_end_of_its_row_alone(vocabulary):
    class Broken:
        def fill_grammar_mask(self, row, remaining=None):
            raise RuntimeError("check failed")

    buffer = MaskBuffer(2, vocabulary)
    good = compile(GrammarSpec.regex("a+"), vocabulary).matcher()
    failures = buffer.fill([MaskFill(0, Broken()), MaskFill(1, good)])
    assert list(failures) == [0] and "check failed" in str(failures[0])
    assert not buffer.words[0].any() and buffer.words[1].any()
