"""Near the budget a draw is that of brute force over all answers that fit, on every path to it.

The device draws the next allowed token from a hash of the tokens so far, so what each answer must be follows from the
list of all answers of its grammar: drafts, neighbours, thoughts and tools change nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from support.engine.draft_engine import (
    EOS,
    GRAMMARS,
    VOCAB,
    Ask,
    Engine,
    FakeDraft,
    MakeEngine,
    always_drafting,
    compute_all_drafts,
    open_engines,
)
from support.engine.fake_worker import chain, next_token
from support.engine.thinking_engine import END, R1, Thinking
from support.engine.thinking_engine import VOCAB as THINKING_VOCAB

from rootgraft.engine.messages import Submit
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.spec import GrammarSpec

PARTS = ["".join(each) for count in (1, 2, 3) for each in product(("ab", "c"), repeat=count)]
# All answers of some grammars of `draft_engine`, by number: a choice, an expression and a tool call.
ANSWERS = {
    2: ["yes, of course", "yes, but", "no"],
    3: [part + end for part in PARTS for end in ("", "-xyz")],
    4: [f"<f>{text}</f>" for text in ("a", "aa", "aaa", "bb", "no more")],
}
PROMPTS = [(1, 2, 3), (7,), (9, 9, 9, 9, 9)]


def wanted_answer(prompt: tuple[int, ...], answers: list[str], budget: int) -> bytes:
    """The answer by brute force: in each step the nearest token after which one of all answers fits."""
    content, text = 0, b""
    for token in prompt:
        content = chain(content, token)
    for remaining in range(budget, 0, -1):
        open_ones = [each.encode()[len(text) :] for each in answers if each.encode().startswith(text)]
        fitting = [rest for rest in open_ones if len(rest) <= remaining] or open_ones
        if fitting == [b""]:
            break
        wanted = next_token(content, VOCAB)
        chosen = min((rest[0] if rest else EOS for rest in fitting), key=lambda token: (token - wanted) % VOCAB)
        if chosen == EOS:
            break
        text += bytes((chosen,))
        content = chain(content, chosen)
    return text


@pytest.fixture
def engine() -> Iterator[MakeEngine]:
    yield from open_engines()


def asks(number: int) -> list[Ask]:
    """Requests at all budgets up to that of the longest answer, each with its own prompt."""
    longest = max(map(len, ANSWERS[number]))
    return [
        Ask(prompt, SamplingParams(max_tokens=budget), number) for budget in range(1, longest + 3) for prompt in PROMPTS
    ]


def assert_as_wanted(drawing: Engine, number: int) -> None:
    requests, first = asks(number), len(drawing.tokens)
    for at, ask in enumerate(requests, first):
        drawing.submit(at, ask)
    drawing.run()
    for at, ask in enumerate(requests, first):
        wanted = wanted_answer(ask.prompt, ANSWERS[number], ask.params.max_tokens)
        assert bytes(token for token in drawing.tokens[at] if token != EOS) == wanted, ask


@pytest.mark.parametrize("number", ANSWERS)
@pytest.mark.parametrize("overlaps", [False, True])
def test_several_at_once_draw_as_brute_force(engine: MakeEngine, number: int, overlaps: bool) -> None:
    assert_as_wanted(engine("off", overlaps=overlaps), number)


@pytest.mark.parametrize("number", ANSWERS)
def test_lookup_drafts_draw_as_brute_force(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Asked twice, so that the tree knows the answers of other budgets to the same prompt."""
    compute_all_drafts(monkeypatch)
    drafted = engine("auto")
    assert_as_wanted(drafted, number)
    assert_as_wanted(drafted, number)
    assert drafted.core.stats()["draft_tokens"]


@pytest.mark.parametrize("number", ANSWERS)
@pytest.mark.parametrize("right", [0.5, 1.0])
def test_drafts_of_a_model_draw_as_brute_force(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, number: int, right: float
) -> None:
    always_drafting(monkeypatch, 3)
    drafted = engine("auto", draft=FakeDraft(400, 4, right))
    assert_as_wanted(drafted, number)
    assert drafted.core.stats()["draft_tokens"]


@pytest.mark.parametrize("number", ANSWERS)
def test_what_another_engine_has_sent_goes_on_as_brute_force_says(engine: MakeEngine, number: int) -> None:
    """A killed replica's requests, cut behind each of their tokens: budgets count what was sent before."""
    drawing, spec, parts = engine("off"), GRAMMARS[number], list[tuple[int, bytes, int]]()
    for ask in asks(number):
        wanted = wanted_answer(ask.prompt, ANSWERS[number], ask.params.max_tokens)
        for cut in range(1, min(len(wanted), ask.params.max_tokens - 1) + 1):
            at = len(parts)
            parts.append((at, wanted, cut))
            drawing.tokens[at] = []
            grammar, sent = (spec.kind.value, spec.content), array("i", list(wanted[:cut]))
            drawing.core.handle([Submit(at, array("i", ask.prompt), ask.params, grammar=grammar, generated=sent)])
    drawing.run()
    assert len(parts) > 50
    for at, wanted, cut in parts:
        assert bytes(token for token in drawing.tokens[at] if token != EOS) == wanted[cut:], (wanted, cut)


def wanted_after_thought(first: int, answers: list[str], budget: int) -> list[int]:
    """The thought that never ends by itself, its end where the shortest answer needs it, and the answer."""
    content, tokens, text, shortest = chain(0, first), list[int](), b"", min(map(len, answers))
    while END not in tokens:
        wanted = next_token(content, THINKING_VOCAB)
        must_end = budget - len(tokens) - 1 < 1 + shortest
        tokens.append(END if must_end else wanted)
        content = chain(content, tokens[-1])
    for remaining in range(budget - len(tokens), 0, -1):
        rests = [each.encode()[len(text) :] for each in answers if each.encode().startswith(text)]
        fitting = [rest for rest in rests if len(rest) <= remaining]
        if not any(fitting):
            break
        wanted = next_token(content, THINKING_VOCAB)
        chosen = min((rest[0] for rest in fitting), key=lambda token: (token - wanted) % THINKING_VOCAB)
        text += bytes((chosen,))
        tokens.append(chosen)
        content = chain(content, chosen)
    return tokens


@pytest.mark.heavy
@pytest.mark.parametrize("drafts", [False, True])
def test_a_thought_and_an_answer_share_a_budget_as_brute_force_says(drafts: bool) -> None:
    """The thought goes on while the shortest answer fits behind it, and what is left decides which answers may come."""
    answers = ["yes", "no", "perhaps"]
    thinking = Thinking(drafts=drafts)
    budgets = range(4, 24)
    try:
        for number, budget in enumerate(budgets):
            thinking.submit(number, GrammarSpec.choice(answers), replace(R1, newlines=0), max_tokens=budget)
        thinking.run()
    finally:
        thinking.core.close()
    ended = 0
    for number, budget in enumerate(budgets):
        wanted = wanted_after_thought(number + 1, answers, budget)
        ended += len(wanted) > 3
        assert thinking.text(number).partition(b"</think>")[2].strip().decode() in answers, budget
        assert thinking.tokens[number] == wanted, budget
    assert ended
