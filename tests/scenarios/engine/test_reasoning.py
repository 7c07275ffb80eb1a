"""Thoughts in the engine: the grammar binds after them, budgets close them, and drafts change nothing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.engine.thinking_engine import EOS, QWEN, R1, TEXT_MARKS, Thinking

from rootgraft.engine.types import FinishReason
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.thought_rules import ThoughtRules

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON = GrammarSpec.json_schema(SCHEMA)
ANSWER = b'{"name":"Ann","age":30}'
YES = GrammarSpec.choice(["yes", "no"])


@pytest.fixture
def engine() -> Iterator[Callable[..., Thinking]]:
    made: list[Thinking] = []

    def make(**options: Any) -> Thinking:
        made.append(Thinking(**options))
        return made[-1]

    yield make
    for thinking in made:
        thinking.core.close()


def with_budget(rules: ThoughtRules, budget: int) -> ThoughtRules:
    return dataclasses.replace(rules, budget=budget)


@pytest.mark.parametrize(
    ("rules", "script"),
    [
        (QWEN, b"<think>so {not} json</think>\n\n" + ANSWER),
        (QWEN, b"\n<think>white space first</think>" + ANSWER),
        (R1, b"so {not} json</think>\n" + ANSWER),
        (R1, b"</think>" + ANSWER),
        (R1, b"a < b </t and </thin, so </</think>" + ANSWER),
        (TEXT_MARKS, b"[[think]] [[en [[[end]]\n\n" + ANSWER),
    ],
)
def test_the_grammar_binds_after_the_thought(engine: Any, rules: ThoughtRules, script: bytes) -> None:
    thinking = engine()
    script = script.lstrip(b"\n") if script.startswith(b"\n") else script
    thinking.submit(0, PERSON, rules, script + b"<eos>", max_tokens=200)
    thinking.run()
    assert thinking.text(0) == script
    assert thinking.worker.num_refused == 0
    assert thinking.ends[0].reason is FinishReason.STOP


@pytest.mark.parametrize("rules", [QWEN, TEXT_MARKS])
def test_the_grammar_binds_at_once_without_a_thought(engine: Any, rules: ThoughtRules) -> None:
    thinking = engine()
    thinking.submit(0, PERSON, rules, ANSWER + b"<eos>", max_tokens=200)
    thinking.submit(1, PERSON, rules, b"So let me see what the answer may be", max_tokens=60)
    thinking.submit(2, GrammarSpec.regex(r"\[\[thi[a-z]{5}"), rules, b"[[thiolate<eos>", max_tokens=60)
    thinking.run()
    assert thinking.text(0) == ANSWER
    text = thinking.text(1)
    begins = rules.start.encode()
    assert thinking.text(2) == b"[[thiolate"  # begins like a mark, and is none
    json.loads(text.partition(rules.end.encode())[2] if text.startswith(begins) else text)


@pytest.mark.parametrize("rules", [R1, QWEN, TEXT_MARKS])
@pytest.mark.parametrize("spec", [PERSON, YES, GrammarSpec.regex("[a-f]{3}-[0-9]+")])
def test_an_answer_is_complete_if_its_shortest_form_fits(engine: Any, rules: ThoughtRules, spec: GrammarSpec) -> None:
    """At any ``max_tokens`` from the shortest form on, whatever the model would rather do: think on for ever."""
    thinking = engine()
    thought = b"" if rules.is_open else rules.start.encode()
    thinking.submit(0, spec, rules, b"!" * 200, max_tokens=1)
    thinking.run()
    shortest = thinking.ends[0].usage.shortest
    lengths = [*range(shortest, shortest + 12), *range(shortest + 12, shortest + 40, 4)]
    for number, length in enumerate(lengths, 1):
        thinking.submit(number, spec, rules, thought + b"and so on, " * 30, max_tokens=length)
    thinking.run()
    thoughts = 0
    for number, length in enumerate(lengths, 1):
        assert thinking.ends[number].reason is FinishReason.STOP, length
        text = thinking.text(number)
        assert len(thinking.tokens[number]) <= length
        before, mark, answer = text.partition(rules.end.encode())
        thoughts += bool(mark)
        answer = (answer if mark else before).lstrip(b"\n")
        if spec is PERSON:
            assert json.loads(answer).keys() == {"name", "age"}
        elif spec is YES:
            assert answer in (b"yes", b"no")
        else:
            assert answer[3:4] == b"-" and answer[4:].isdigit()
    assert thoughts > len(lengths) / 4


def test_one_token_fewer_is_cut_off_and_told(engine: Any) -> None:
    thinking = engine()
    thinking.submit(0, YES, R1, b"", max_tokens=2)
    thinking.submit(1, YES, R1, b"thinking", max_tokens=3)
    thinking.run()
    assert thinking.ends[0].reason is FinishReason.LENGTH and thinking.ends[0].usage.shortest == 3
    assert thinking.ends[1].reason is FinishReason.STOP and thinking.text(1) == b"</think>no"


@pytest.mark.parametrize("spec", [None, PERSON])
@pytest.mark.parametrize("budget", [0, 1, 5, 40])
@pytest.mark.parametrize("rules", [R1, QWEN, TEXT_MARKS])
def test_a_budget_closes_the_thought(engine: Any, rules: ThoughtRules, budget: int, spec: GrammarSpec | None) -> None:
    thinking = engine()
    opening = b"" if rules.is_open else rules.start.encode()
    script = opening + b"on and on " * 20
    thinking.submit(0, spec, with_budget(rules, budget), script, max_tokens=150)
    thinking.run()
    thought, mark, answer = thinking.text(0).partition(rules.end.encode())
    assert mark and thought == script[: len(opening) + budget]
    if spec is None:
        assert len(thinking.tokens[0]) == 150 and thinking.ends[0].reason is FinishReason.LENGTH
    else:
        json.loads(answer)


def test_a_budget_that_is_not_used_up_changes_nothing(engine: Any) -> None:
    thinking = engine()
    script = b"<think>short</think>\n\nThe answer, and </think> in it.<eos>"
    thinking.submit(0, None, with_budget(QWEN, 6), script, max_tokens=150)
    thinking.submit(1, None, with_budget(QWEN, 0), b"No thought, and <think>none later.<eos>", max_tokens=150)
    thinking.submit(2, None, with_budget(R1, 100), b"it ends in its thought<eos>", max_tokens=150)
    thinking.run()
    assert thinking.worker.num_refused == 0
    assert [thinking.text(number) for number in range(3)] == [
        b"<think>short</think>\n\nThe answer, and </think> in it.",
        b"No thought, and <think>none later.",
        b"it ends in its thought",
    ]
    assert all(end.reason is FinishReason.STOP for end in thinking.ends.values())


def test_an_answer_that_has_a_form_does_not_end_inside_the_thought(engine: Any) -> None:
    thinking = engine()
    thinking.submit(0, YES, R1, b"so<eos>", max_tokens=60)
    thinking.submit(1, YES, R1, b"", max_tokens=60, min_tokens=20)
    thinking.run()
    for number in (0, 1):
        assert thinking.text(number).partition(b"</think>")[2].strip(b"\n") in (b"yes", b"no")


def test_a_mark_of_text_ends_with_a_token_of_its_own_before_a_grammar(engine: Any) -> None:
    """``> no`` would complete the mark and say the answer's first bytes, which no grammar sees."""
    rules = ThoughtRules("<t>", "</think>", is_open=True)
    spelled = [ord("a"), 259, 260, 264]  # a, </, think, "> no"
    thinking = engine()
    thinking.submit(0, YES, rules, spelled, max_tokens=60)
    thinking.submit(1, None, with_budget(rules, 50), [*spelled, ord("!"), EOS], max_tokens=60)
    thinking.run()
    answer = thinking.text(0).partition(b"</think>")[2]
    assert answer in (b"yes", b"no") and thinking.worker.num_refused > 0
    assert thinking.text(1) == b"a</think> no!"


def test_a_lead_comes_between_thought_and_answer(engine: Any) -> None:
    rules = dataclasses.replace(QWEN, lead='<call>{"a": ')
    thinking = engine()
    spec = GrammarSpec.json_schema({"type": "integer", "minimum": 10, "maximum": 99})
    thinking.submit(0, spec, rules, b'<think>x</think>\n<call>{"a": 42<eos>', max_tokens=100)
    thinking.submit(1, spec, rules, b'<call>{"a": 42<eos>', max_tokens=100)
    thinking.submit(2, spec, rules, b"<think>" + b"on " * 30, max_tokens=30)
    thinking.run()
    assert thinking.text(0) == b'<think>x</think>\n<call>{"a": 42'
    assert thinking.text(1) == b'<call>{"a": 42'
    before, lead, number = thinking.text(2).partition(b'</think><call>{"a": ')
    assert before.startswith(b"<think>on ") and lead and 10 <= int(number) <= 99
    assert thinking.ends[2].reason is FinishReason.STOP


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("rules", [R1, QWEN, TEXT_MARKS])
def test_drafts_and_preemption_change_nothing(engine: Any, rules: ThoughtRules, overlaps: bool) -> None:
    """The same tokens with drafts and without, on many pages and on few.

    Of the cases one half overlaps and the other does not: each end and each limit with every budget.
    """
    opening = b"" if rules.is_open else rules.start.encode()
    repeated = b"so it is, so it is, so it is, "
    cases = [
        (spec, with_budget(rules, budget) if budget else rules, opening + repeated * 3 + end, limit)
        for spec in (None, PERSON)
        for at, budget in enumerate((None, 0, 33, 70))
        for has_end, end in enumerate((b"", rules.end.encode() + b"\n\n" + ANSWER))
        for is_long, limit in enumerate((60, 140))
        if (spec or budget) and (at + has_end + is_long) % 2 == overlaps
    ]

    def answers(**options: Any) -> list[list[int]]:
        thinking = engine(overlaps=overlaps, **options)
        for number, (spec, case_rules, script, limit) in enumerate(cases):
            thinking.submit(number, spec, case_rules, script + b"<eos>", max_tokens=limit, prompt=repeated)
        thinking.run()
        return [thinking.tokens[number] for number in range(len(cases))]

    expected = answers(drafts=False)
    assert answers() == expected
    assert answers(num_pages=60) == expected


def test_a_thought_is_a_prefix_like_any_other(engine: Any) -> None:
    thinking = engine()
    script = b"a thought</think>" + ANSWER + b"<eos>"
    thinking.submit(0, PERSON, R1, script, max_tokens=100)
    thinking.run()
    first, prompt = thinking.text(0), bytes(token for token in thinking.tokens[0][:9])
    thinking.ends.clear()
    thinking.submit(0, PERSON, R1, script[len(prompt) :], prompt=prompt, max_tokens=100)
    thinking.run()
    assert prompt + thinking.text(0) == first
    assert thinking.ends[0].usage.cached >= len(prompt)
