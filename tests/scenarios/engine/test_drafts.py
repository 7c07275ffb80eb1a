"""Drafts change when tokens come, never which: on the worker without tensors, with guesses right, wrong and absurd."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.core_hooks import draft_states, scheduler_of, worker_of
from support.engine.draft_engine import (
    DRAWN,
    EOS,
    VOCAB,
    Ask,
    Engine,
    answers_with,
    answers_without,
    compute_all_drafts,
    open_engines,
    pool_options,
)
from support.machine.thoroughness import repeats

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.messages import Abort
from rootgraft.engine.sequence.sequence import Sequence, SequenceSpec
from rootgraft.engine.speculation.acceptance import AcceptanceRate
from rootgraft.engine.speculation.proposer import DraftSource, Proposal, Proposer
from rootgraft.engine.types import SamplingParams
from rootgraft.radix.namespace import Namespace, Path


@pytest.fixture
def engine():
    yield from open_engines()


@pytest.fixture
def eager(monkeypatch):
    compute_all_drafts(monkeypatch)


def guessing(monkeypatch, guess) -> None:
    """Let ``guess(sequence)`` give every draft."""

    def proposals(self, sequence, state):
        tokens = guess(sequence)
        runs = [(AcceptanceRate(20.0, 20.0), len(tokens))]
        return [Proposal(DraftSource.NGRAM, runs, tokens, sequence.num_tokens)] if tokens else []

    monkeypatch.setattr(Proposer, "_proposals", proposals)


@settings(max_examples=repeats(60), deadline=None)
@given(**DRAWN, kind=st.sampled_from(["right", "wrong", "mixed", "sources", "none"]), overlaps=st.booleans())
def test_any_drafts_change_nothing_but_the_number_of_steps(asks, seed, page_size, budget, num_pages, kind, overlaps):
    """Chunks, preemption, ends inside of drafts, budgets that close, steps planned ahead: each sequence gets what it
    got without.
    """
    options = pool_options(num_pages, page_size, budget)
    expected = answers_without(asks, options)
    rng = random.Random(seed)

    def guess(sequence: Sequence) -> list[int]:
        tokens, *_ = expected[sequence.id]
        right = [*tokens, EOS, 7, 7][sequence.num_generated :][: rng.randint(0, 16)]
        wrong = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 16))]
        cut = rng.randint(0, len(right))
        return {"right": right, "wrong": wrong, "mixed": [*right[:cut], *wrong], "none": []}[kind]

    with pytest.MonkeyPatch.context() as patch:
        compute_all_drafts(patch)
        if kind != "sources":
            guessing(patch, guess)
        drafted = Engine.make("auto", **options, overlaps=overlaps)
        assert answers_with(drafted, asks, rng) == expected
        drafted.close()


def test_right_drafts_save_steps(engine, eager, monkeypatch):
    ask = Ask((1, 2, 3), SamplingParams(max_tokens=69, ignore_eos=True))
    plain = engine("off")
    plain.submit(0, ask)
    expected = plain.run()
    guessing(monkeypatch, lambda sequence: expected[0][0][sequence.num_generated :][:16])
    drafted = engine()
    drafted.submit(0, ask)
    assert drafted.run() == expected
    assert plain.core.stats()["steps"] == 69
    assert drafted.core.stats()["steps"] == 5  # of 17, 17, 17, 17 and 1 tokens
    assert drafted.core.stats()["draft_tokens_accepted"] == drafted.core.stats()["draft_tokens"] == 64


def test_the_tree_knows_an_answer_that_was_given_before(engine, eager):
    ask = Ask(tuple(range(20)), SamplingParams(max_tokens=60, ignore_eos=True))
    twice = engine()
    twice.submit(0, ask)
    twice.run()
    before = twice.core.stats()["steps"]
    twice.submit(1, ask)
    results = twice.run()
    assert results[0] == results[1]
    stats = twice.core.stats()
    assert stats["steps"] - before <= 10
    assert stats["drafts_accepted_tree"] >= 50


def test_another_namespace_learns_nothing_from_the_tree(engine, eager):
    twice = engine()
    ask = Ask(tuple(range(20)), SamplingParams(max_tokens=60, ignore_eos=True))
    twice.submit(0, ask)
    twice.run()
    twice.tokens[1] = []
    path = Path(Namespace("fake", None, "salt"))
    scheduler_of(twice.core).add(
        Sequence(1, array("i", ask.prompt), ask.params, path, SequenceSpec(frozenset(), 1, 0.0, 1000))
    )
    twice.run()
    assert "drafted_tree" not in twice.core.stats()


def test_text_that_a_grammar_forces_takes_few_steps(engine, eager):
    plain, drafted = engine("off"), engine()
    for each in (plain, drafted):
        each.submit(0, Ask((1,), SamplingParams(max_tokens=60), grammar=0))
    assert plain.run() == drafted.run()
    assert drafted.core.stats()["drafts_accepted_grammar"] > 5
    assert drafted.core.stats()["steps"] < plain.core.stats()["steps"] - 5
    # A mask with one token needs no model, with drafts or without; but whoever wants logprobs wants the model's.
    assert plain.core.stats()["forced_tokens"] == drafted.core.stats()["forced_tokens"] > 10
    scored = engine()
    scored.submit(0, Ask((1,), SamplingParams(max_tokens=60, logprobs=0), grammar=0))
    scored.run()
    assert scored.core.stats()["forced_tokens"] == 0


def test_nobody_is_preempted_for_a_draft(engine, eager, monkeypatch):
    """Pages just enough for two sequences: with drafts as without, none is preempted."""
    asks = [Ask((i, 1, 2), SamplingParams(max_tokens=37, ignore_eos=True)) for i in range(2)]
    guessing(monkeypatch, lambda sequence: [9] * 16)
    for method in ("off", "auto"):
        each = engine(method, num_pages=20, page_size=4, max_num_seqs=2)
        for number, ask in enumerate(asks):
            each.submit(number, ask)
        each.run()
        assert each.core.stats()["preemptions"] == 0
    assert each.core.stats()["draft_tokens"] > 0


def test_drafts_take_only_what_the_others_leave_of_a_step(engine, eager, monkeypatch):
    guessing(monkeypatch, lambda sequence: [9] * 16)
    each = engine(budget=12, max_num_seqs=4, num_pages=400)
    for number in range(3):
        each.submit(number, Ask((number, 1), SamplingParams(max_tokens=30, ignore_eos=True)))
    each.step()
    each.submit(3, Ask(tuple(range(100)), SamplingParams(max_tokens=3)))
    while worker_of(each.core).batches[-1].rows[-1].num_generated == 0:
        each.step()
        batch = worker_of(each.core).batches[-1]
        assert batch.num_tokens <= 12
        if not batch.rows[-1].draws:
            assert not any(row.num_drafts for row in batch.rows)


def test_an_abort_forgets_the_record_of_a_sequence(engine):
    each = engine()
    each.submit(0, Ask((1, 2), SamplingParams(max_tokens=30, ignore_eos=True)))
    each.step()
    assert draft_states(each.core)
    each.core.handle([Abort((0,))])
    each.run()
    assert not draft_states(each.core)


def test_without_drafts_no_row_has_any(engine):
    plain = engine("off")
    plain.submit(0, Ask((3,) * 40, SamplingParams(max_tokens=40, ignore_eos=True)))
    plain.run()
    assert not any(row.num_drafts for batch in worker_of(plain.core).batches for row in batch.rows)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ngram", "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ('{"method": "eagle", "model": "m"}', "eagle3, mtp, off, not eagle. EAGLE-1, EAGLE-2 and Medusa"),
        ('{"method": "eagle3"}', "must name the draft model, as --model does, not None"),
        ('{"method": "mtp", "model": "m"}', "model of --speculative-config must not be given with method mtp: the"),
        ('{"method": "glm4_moe_mtp", "model": "m"}', "must not be given with method mtp"),
        ('{"method": "ernie_mtp"}', "must be one of auto, ngram, draft_model, eagle3, mtp, off, not ernie_mtp"),
        ('{"method": ["mtp"]}', "must be one of auto, ngram, draft_model, eagle3, mtp, off, not ['mtp']"),
        ('{"method": "mtp", "quantization": "awq"}', "must be one of gguf, gguf_dynamic, int8_weight_only, int8_dyn"),
        (
            '{"method": "ngram", "model": "org/draft"}',
            "model of --speculative-config needs a draft model; method ngram",
        ),
        ('{"quantization": "gguf"}', "quantization of --speculative-config needs a draft model; method auto has none"),
        ('{"method": "draft_model"}', "must name the draft model, as --model does, not None"),
        ('{"model": ""}', "must name the draft model, as --model does, not ."),
        ('{"model": 5}', "must name the draft model, as --model does, not 5"),
        ('{"model": "m", "quantization": "awq"}', "must be one of gguf, gguf_dynamic, int8_weight_only, int8_dynamic"),
        (
            '{"model": "m", "draft_tensor_parallel_size": 2}',
            "draft_tensor_parallel_size of --speculative-config must be 1",
        ),
        ('{"model": "m", "disable_by_batch_size": 4}', "has no key 'disable_by_batch_size'"),
        ('{"num_speculative_tokens": 0}', "from 1 to 64, not 0"),
        ('{"num_speculative_tokens": true}', "from 1 to 64, not True"),
        ('{"num_speculative_tokens": 65}', "from 1 to 64, not 65"),
    ],
)
def test_the_option_is_refused_by_what_is_wrong_with_it(text, complaint):
    with pytest.raises(ConfigError, match="speculative-config") as refusal:
        EngineConfig(speculative_config=text)
    assert complaint in str(refusal.value)


def test_keys_of_vllm_that_change_speed_alone_are_taken():
    config = EngineConfig(speculative_config='{"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}')
    assert config.speculative.method == "ngram"
    assert EngineConfig(speculative_config='{"method": "suffix"}').speculative.method == "auto"
    with_model = '{"model": "org/draft", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}'
    assert EngineConfig(speculative_config=with_model).speculative.method == "draft_model"
