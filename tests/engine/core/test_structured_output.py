"""Grammars in the engine: real matchers over a vocabulary of single bytes, on the worker without tensors."""

from __future__ import annotations

import json
import re
import time
from array import array

import pytest
from support.engine.core_hooks import wait_for_vocabulary
from support.engine.fake_worker import FakeWorker
from support.engine.structured_engine import EOS, TEXTS, VOCAB, Structured

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core import structured_output
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.core.structured_output import MOST_AHEAD
from rootgraft.engine.messages import Abort, Done, Failed, PrepareGrammar, Submit, TokenOut
from rootgraft.engine.types import FinishReason, SamplingParams
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.thought_rules import ThoughtRules

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def engine():
    made = []

    def make(**options):
        made.append(Structured(**options))
        return made[-1]

    yield make
    for structured in made:
        structured.core.close()


def test_each_row_follows_its_own_grammar_beside_free_rows(engine):
    structured = engine()
    structured.submit(0, GrammarSpec.json_schema(SCHEMA), max_tokens=80)
    structured.submit(1, None, max_tokens=30)
    structured.submit(2, GrammarSpec.regex("[a-f]{3}-[0-9]+"), max_tokens=30)
    structured.submit(3, GrammarSpec.choice(["yes", "no"]), max_tokens=30)
    structured.run()
    value = json.loads(structured.texts[0])
    assert isinstance(value["name"], str) and 0 <= value["age"] <= 150
    assert re.fullmatch(rb"[a-f]{3}-[0-9]+", structured.texts[2])
    assert structured.texts[3] in (b"yes", b"no")
    assert structured.ends[1].reason is FinishReason.LENGTH
    assert all(structured.ends[i].reason is FinishReason.STOP for i in (0, 2, 3))


def test_a_grammar_compiled_ahead_is_found_in_the_cache(engine):
    structured = engine()
    spec, wrong = GrammarSpec.json_schema(SCHEMA), GrammarSpec.regex("(")
    for each in (spec, wrong):
        structured.core.handle([PrepareGrammar(each.kind.value, each.content)])
    assert not structured.core.has_work
    wait_for_vocabulary(structured.core)
    stats = structured.core.stats
    while not (stats()["grammar_compiled"] and stats()["grammar_refused"]):
        time.sleep(0.01)
    structured.submit(0, spec, max_tokens=80)
    structured.submit(1, wrong, max_tokens=80)
    structured.run()
    assert json.loads(structured.texts[0]).keys() == {"name", "age"}
    assert isinstance(structured.ends[1], Failed) and structured.ends[1].kind == "GrammarRefused"
    assert (stats()["grammar_compiled"], stats()["grammar_hits"]) == (1, 2)


def test_few_grammars_are_compiled_ahead_at_a_time(engine):
    structured = engine()
    wait_for_vocabulary(structured.core)
    specs = [GrammarSpec.regex(f"a{{{number}}}") for number in range(1, 60)]
    structured.core.handle([PrepareGrammar(spec.kind.value, spec.content) for spec in specs])
    assert 1 <= structured.core.stats()["grammar_pending"] <= MOST_AHEAD


def test_nothing_is_compiled_ahead_for_a_model_that_follows_no_grammar():
    core = EngineCore(EngineConfig(), FakeWorker(100, 4, vocab_size=VOCAB))
    core.handle([PrepareGrammar("regex", b"a")])
    assert not core.has_work


def test_the_answer_is_the_same_after_preemption_and_from_the_cache(engine):
    alone = engine()
    alone.submit(0, GrammarSpec.json_schema(SCHEMA), max_tokens=60)
    alone.run()
    crowded = engine(num_pages=36, max_num_seqs=4)
    for i in range(4):
        crowded.submit(i, GrammarSpec.json_schema(SCHEMA), prompt=b"p" if not i else bytes([i]) * 30, max_tokens=60)
    crowded.run()
    assert crowded.core.stats()["preemptions"] > 0
    assert crowded.texts[0] == alone.texts[0]
    assert all(json.loads(text) for text in crowded.texts.values())
    crowded.submit(9, GrammarSpec.json_schema(SCHEMA), max_tokens=60)
    crowded.run()
    assert crowded.texts[9] == alone.texts[0]


@pytest.mark.parametrize("budget", [*range(19, 30), 40])
def test_an_answer_is_complete_whenever_its_shortest_form_fits(engine, budget):
    structured = engine()
    structured.submit(0, GrammarSpec.json_schema(SCHEMA), max_tokens=budget)
    structured.run()
    assert structured.ends[0].reason is FinishReason.STOP
    assert json.loads(structured.texts[0]).keys() == {"name", "age"}


def test_a_budget_below_the_shortest_form_ends_with_length(engine):
    structured = engine()
    structured.submit(0, GrammarSpec.json_schema(SCHEMA), max_tokens=10)
    structured.submit(1, None, max_tokens=10)
    structured.run()
    assert structured.ends[0].reason is FinishReason.LENGTH
    assert structured.ends[0].usage.shortest == len('{"name":"","age":0}')
    assert structured.ends[1].usage.shortest is None


def test_free_text_with_tags_is_neither_ended_early_nor_called_complete_when_cut(engine):
    tag = {"begin": "<c>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</c>"}
    spec = GrammarSpec.structural_tag({"format": {"type": "triggered_tags", "triggers": ["<c>"], "tags": [tag]}})
    structured = engine()
    structured.submit(0, spec, max_tokens=40, min_tokens=40)
    structured.run()
    assert len(structured.texts[0]) == 40 and structured.ends[0].reason is FinishReason.LENGTH


def test_min_tokens_hold_as_long_as_the_grammar_goes_on(engine):
    structured = engine()
    structured.submit(0, GrammarSpec.regex("[ab]{2,9}"), max_tokens=30, min_tokens=7)
    structured.submit(1, GrammarSpec.choice(["yes"]), max_tokens=30, min_tokens=7)
    structured.run()
    assert 7 <= len(structured.texts[0]) <= 9 and structured.texts[1] == b"yes"
    assert all(end.reason is FinishReason.STOP for end in structured.ends.values())


def test_stop_tokens_wait_for_min_tokens_where_the_form_has_another_token(engine):
    """As of an answer in free text, they are no tokens of it before; the form decides where only they are left."""
    structured = engine()
    early = {"max_tokens": 30, "min_tokens": 7, "stop_token_ids": (ord("b"),)}
    for number in range(6):
        structured.submit(number, GrammarSpec.regex("[ab]{2,9}"), seed=number, prompt=bytes([number + 65]), **early)
    structured.submit(6, GrammarSpec.regex("ab{3}a*"), **early)
    structured.run()
    assert all(structured.texts[number][:7] == b"aaaaaaa" for number in range(6))
    assert structured.texts[6][:7] == b"abbbaaa"
    ends = [structured.ends[number] for number in range(7)]
    assert all(end.reason is FinishReason.STOP for end in ends)
    assert {end.stop_token for end in ends} <= {ord("b"), EOS}


def test_after_a_thought_with_a_budget_stop_tokens_of_free_text_wait_for_min_tokens(engine):
    structured = engine()
    thought = ThoughtRules("<t>", "</t>", is_open=True, budget=2)
    stops = tuple(range(256))
    params = SamplingParams(max_tokens=20, min_tokens=12, stop_token_ids=stops[5:])
    structured.core.handle([Submit(0, array("i", [7]), params, reasoning=thought)])
    messages = []
    while structured.core.has_work:
        messages += structured.core.step()
    tokens = [token for message in messages if isinstance(message, TokenOut) for token in message.tokens]
    # The last id is no token, so that it is no stop token either.
    free = {*range(5), VOCAB - 1}
    assert bytes(tokens[2:6]) == b"</t>" and free.issuperset(tokens[6:12]), tokens
    [end] = [message for message in messages if isinstance(message, Done)]
    assert end.stop_token in (*stops[5:], EOS) if len(tokens) < 20 else end.reason is FinishReason.LENGTH


ENDLESS = {
    "regex": GrammarSpec.regex("(ab|c)*"),
    "grammar": GrammarSpec.lark('start: ("<" /[a-z]*/ ">")*'),
    "list": GrammarSpec.json_schema({"type": "array", "items": {"type": "integer"}}),
}


@pytest.mark.parametrize("form", ENDLESS)
def test_min_tokens_may_be_the_whole_budget(engine, form):
    """The budget ends no answer before them: only a grammar that allows nothing more does, as after a list."""
    structured = engine(num_pages=600)
    for most in range(30, 60, 3):
        structured.submit(most, ENDLESS[form], max_tokens=most, min_tokens=most, seed=most)
    structured.run()
    for most in range(30, 60, 3):
        assert structured.ends[most].reason is FinishReason.STOP
        text = structured.texts[most]
        # The last token of an expression may have no room for one that needs two.
        assert len(text) >= most - 1 or (form == "list" and isinstance(json.loads(text), list))


def test_a_budget_that_changes_nothing_is_not_told_and_one_that_does_is(engine):
    structured = engine()
    structured.submit(0, GrammarSpec.choice(["yes", "no"]), max_tokens=2)
    structured.submit(1, GrammarSpec.choice(["yes", "no"]), max_tokens=60)
    structured.submit(2, GrammarSpec.regex("[ab]+"), max_tokens=5, min_tokens=5)
    structured.run()
    free = structured.texts[1]
    assert structured.texts[0] == b"no" and (0 in structured.limited) == (free != b"no")
    assert 1 not in structured.limited
    assert len(structured.texts[2]) == 5 and 2 in structured.limited
    assert all(end.reason is FinishReason.STOP for end in structured.ends.values())


@pytest.mark.parametrize("spec", [GrammarSpec.json_schema(SCHEMA), GrammarSpec.regex("(ab|cde)+")])
def test_an_answer_that_fits_is_the_same_at_every_budget(engine, spec):
    structured = engine(num_pages=900)
    structured.submit(0, spec, max_tokens=90)
    structured.run()
    needed = len(structured.texts[0]) + 1
    for more in range(6):
        structured.submit(1 + more, spec, max_tokens=needed + more)
    structured.run()
    if structured.ends[0].stop_token is not None:
        assert all(structured.texts[1 + more] == structured.texts[0] for more in range(6))
        assert not structured.limited


def test_a_refused_grammar_fails_alone_and_names_its_keyword(engine):
    structured = engine()
    structured.submit(0, GrammarSpec.json_schema({"type": "string", "$dynamicRef": "#x"}), max_tokens=5)
    structured.submit(1, None, max_tokens=5)
    structured.run()
    failed = structured.ends[0]
    assert isinstance(failed, Failed) and failed.kind == "GrammarRefused"
    assert "$dynamicRef" in failed.message
    assert structured.ends[1].reason is FinishReason.LENGTH


def test_a_compile_that_the_clock_overtakes_goes_on_and_the_grammar_is_found_when_asked_for_again(engine, monkeypatch):
    structured = engine()
    spec = GrammarSpec.json_schema(SCHEMA)
    wait_for_vocabulary(structured.core)
    with monkeypatch.context() as patched:
        patched.setattr(structured_output, "MOST_WAITED", 0.0)
        structured.submit(0, spec, max_tokens=80)
        structured.run()
    failed = structured.ends[0]
    assert isinstance(failed, Failed) and failed.kind == "CapacityError"
    assert "not compiled within 0 s" in failed.message
    structured.submit(1, spec, max_tokens=80)
    structured.run()
    assert json.loads(structured.texts[1]).keys() == {"name", "age"}
    assert structured.core.stats()["grammar_compiled"] == 1 and not structured.core.stats()["grammar_refused"]


def test_an_abort_while_the_grammar_compiles(engine):
    structured = engine()
    structured.submit(0, GrammarSpec.json_schema(SCHEMA), max_tokens=5)
    structured.core.handle([Abort((0,))])
    structured.run()
    assert structured.ends[0].reason is FinishReason.ABORT
    assert structured.core.stats()["waiting"] == 0


@pytest.mark.parametrize("eos", [(), (VOCAB - 1,)], ids=["none", "none that is a token"])
def test_a_model_without_end_token_follows_no_grammar(eos: tuple[int, ...]):
    """An id of a padded vocabulary without a token ends no structured answer; neither does it end the engine."""
    core = EngineCore(EngineConfig(), FakeWorker(50, 16, vocab_size=VOCAB, eos=eos))
    core.handle([TEXTS, Submit(0, array("i", [1]), SamplingParams(), grammar=("choice", b'["a"]'))])
    [failed] = core.step()
    assert isinstance(failed, Failed) and "end token" in failed.message
