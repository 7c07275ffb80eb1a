"""Every kind of grammar in the engine: alone, from the cache, after preemption, several at once, with sampling."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
from support.engine.structured_engine import Structured

from rootgraft.engine.types import FinishReason
from rootgraft.grammar.spec import GrammarSpec

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 10}},
    "required": ["a"],
    "additionalProperties": False,
}
CALL = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}


def _is_answer(text: bytes) -> bool:
    return 10 <= json.loads(text)["a"] <= 99


FORMS: dict[str, tuple[GrammarSpec, Callable[[bytes], object]]] = {
    "json_schema": (GrammarSpec.json_schema(SCHEMA), _is_answer),
    "json_object": (GrammarSpec.json_object(), lambda text: isinstance(json.loads(text), dict)),
    "regex": (GrammarSpec.regex("[a-f]{3}-[0-9]+"), lambda text: re.fullmatch(rb"[a-f]{3}-[0-9]+", text)),
    "choice": (GrammarSpec.choice(["yes", "no"]), lambda text: text in (b"yes", b"no")),
    "ebnf": (GrammarSpec.ebnf('root ::= "x" [0-9]{2,4}'), lambda text: re.fullmatch(rb"x[0-9]{2,4}", text)),
    "lark": (GrammarSpec.lark('start: "x" N\nN: /[0-9]{2,4}/'), lambda text: re.fullmatch(rb"x[0-9]{2,4}", text)),
    "tag": (
        GrammarSpec.structural_tag({"format": CALL}),
        lambda text: _is_answer(text.removeprefix(b"<f>").removesuffix(b"</f>")),
    ),
}
SAMPLING = [{}, {"temperature": 0.0}, {"temperature": 2.0, "top_k": 5, "min_p": 0.01}, {"repetition_penalty": 1.5}]


@pytest.fixture(scope="module")
def roomy() -> Iterator[Structured]:
    structured = Structured(num_pages=400, max_num_seqs=8)
    yield structured
    structured.core.close()


@pytest.fixture(scope="module")
def crowded() -> Iterator[Structured]:
    structured = Structured(num_pages=24, max_num_seqs=4)
    yield structured
    structured.core.close()


def run(structured: Structured, form: str, prompts: list[bytes], **params) -> list[bytes]:
    """All answers, each of which must hold the form."""
    spec, holds = FORMS[form]
    first = len(structured.ends)
    numbers = range(first, first + len(prompts))
    for number, prompt in zip(numbers, prompts, strict=True):
        structured.submit(number, spec, prompt, **{"max_tokens": 48, "seed": 1, **params})
    structured.run()
    for number in numbers:
        assert structured.ends[number].reason is FinishReason.STOP, structured.ends[number]
        assert holds(structured.texts[number]), structured.texts[number]
    return [structured.texts[number] for number in numbers]


@pytest.mark.parametrize("form", FORMS)
def test_alone_from_the_cache_and_several_at_once(roomy, form):
    prompt = form.encode() * 3
    [alone] = run(roomy, form, [prompt])
    before = roomy.core.stats()["prompt_tokens_cached"]
    assert run(roomy, form, [prompt] * 3) == [alone] * 3
    assert roomy.core.stats()["prompt_tokens_cached"] > before


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("params", SAMPLING)
def test_with_parameters_of_sampling_and_a_budget(roomy, form, params):
    run(roomy, form, [b"p", b"q"], **params)
    shortest = roomy.ends[len(roomy.ends) - 1].usage.shortest
    assert shortest
    run(roomy, form, [b"p"], **params, max_tokens=shortest)


@pytest.mark.parametrize("form", FORMS)
def test_near_the_budget_an_answer_does_not_depend_on_its_neighbours(roomy, form):
    """Several at once, as of a request with n = 3, and each alone: what the budget excludes is each one's own."""
    run(roomy, form, [b"p"])
    shortest = roomy.ends[len(roomy.ends) - 1].usage.shortest
    assert shortest
    for spare in (0, 1, 3, 6):
        budget = shortest + spare
        together = run(roomy, form, [b"p", b"q", b"r"], max_tokens=budget)
        alone = [run(roomy, form, [prompt], max_tokens=budget)[0] for prompt in (b"r", b"q", b"p")]
        assert together == alone[::-1]
        # A text of single bytes: the end token may or may not be one of the budget.
        assert max(map(len, together)) <= budget


LONG_TEXT = {"type": "string", "pattern": "^[a-z]{24,30}$"}
LONG_SCHEMA = {"type": "object", "properties": {"a": LONG_TEXT}, "required": ["a"], "additionalProperties": False}
LONG_TAG = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": LONG_TEXT}, "end": "</f>"}
# Answers long enough to be preempted; ``json_object``, compiled as a schema, has no such.
LONG: dict[str, GrammarSpec] = {
    "json_schema": GrammarSpec.json_schema(LONG_SCHEMA),
    "regex": GrammarSpec.regex("[a-f]{24,30}"),
    "choice": GrammarSpec.choice(["yes" * 9, "no" * 14]),
    "ebnf": GrammarSpec.ebnf("root ::= [0-9]{24,30}"),
    "lark": GrammarSpec.lark("start: N\nN: /[0-9]{24,30}/"),
    "tag": GrammarSpec.structural_tag({"format": LONG_TAG}),
}


@pytest.mark.parametrize("form", LONG)
def test_after_preemption(roomy, crowded, form, monkeypatch):
    monkeypatch.setitem(FORMS, form, (LONG[form], lambda text: len(text) >= 24))
    prompts = [bytes([number]) * 14 for number in range(1, 5)]
    expected = run(roomy, form, prompts, min_tokens=24)
    before = crowded.core.stats()["preemptions"]
    assert run(crowded, form, prompts, min_tokens=24) == expected
    assert crowded.core.stats()["preemptions"] > before
