"""gpt-oss's harmony over tokens: thoughts, calls and content in channels, whose marks are special tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rootgraft.api.protocol.tools import Function, NamedChoice, Tool
from rootgraft.api.structured.output_format import OutputFormat
from rootgraft.api.structured.thought_plan import plan_thought
from rootgraft.api.structured.tool_formats import FORMATS
from rootgraft.api.structured.tool_grammar import tool_output_format
from rootgraft.engine.text.reasoning_formats import FORMATS as THOUGHTS
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.match.reasoning_matcher import ReasoningMatcher
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
WORDS = ("assistant", "final", "commentary", "analysis", "json", "The", " city")
TOKENS = (*(bytes([byte]) for byte in range(256)), *(word.encode() for word in (*WORDS, *MARKS)))
SPECIAL = frozenset(range(len(TOKENS) - len(MARKS), len(TOKENS)))
RETURN, CALL = len(TOKENS) - 2, len(TOKENS) - 1
VOCABULARY = Vocabulary(TOKENS, SPECIAL, (RETURN, CALL))
CITY = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Bonn"]}}, "required": ["city"]}
TOOLS = [Tool(type="function", function=Function(name="weather", parameters={**CITY, "additionalProperties": False}))]
ANALYSIS, NEXT, FINAL = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"
CALL_HEAD = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
PREAMBLE = f"<|channel|>commentary<|message|>I look.{NEXT}"
DOCUMENT = GrammarSpec.json_schema({"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}})
ASKED = OutputFormat(DOCUMENT, "response_format", "json_schema", DOCUMENT)


def matcher(choice: Any = "auto", asked: OutputFormat | None = None, budget: int | None = None) -> ReasoningMatcher:
    found = tool_output_format(TOOLS, choice, FORMATS["openai"], asked, parallel=True) if choice else asked
    assert found is not None
    plan = plan_thought(
        THOUGHTS["openai_gptoss"], "<|end|><|start|>assistant", continued=None, output_format=found, shown=True
    )
    assert plan is not None
    return ReasoningMatcher(VOCABULARY, plan.rules(budget), compile(found.spec, VOCABULARY).matcher())


def allowed(found: ReasoningMatcher, remaining: int | None = None) -> set[int]:
    mask = np.zeros(VOCABULARY.num_words, dtype=np.int32)
    found.fill_mask(mask, remaining)
    return {int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))}


def is_admitted(found: ReasoningMatcher, text: str, end: int = RETURN) -> bool:
    for token in [*VOCABULARY.tokenize_named(text), end]:
        if token not in allowed(found) or not found.accept(token):
            return False
    return True


@pytest.mark.parametrize("thought", ["", f"{ANALYSIS}The user asks <|en.{NEXT}"])
@pytest.mark.parametrize(
    ("text", "end", "auto", "required"),
    [
        (f'{CALL_HEAD}{{"city": "Ulm"}}', CALL, True, True),
        (f'{PREAMBLE}{CALL_HEAD}{{"city":"Bonn"}}', CALL, True, False),
        (f'{CALL_HEAD}{{"city": "Rome"}}', CALL, False, False),
        (f"{FINAL}It rains.", RETURN, True, False),
        (f"{PREAMBLE}{FINAL}It rains.", RETURN, True, False),
        ("It rains.", RETURN, False, False),
        (f"{ANALYSIS}Hm.", RETURN, False, False),
        (PREAMBLE, RETURN, False, False),
    ],
)
def test_what_may_follow_a_thought(thought: str, text: str, end: int, auto: bool, required: bool) -> None:
    assert is_admitted(matcher(), thought + text, end) is auto
    assert is_admitted(matcher("required"), thought + text, end) is required


def test_a_form_stands_in_the_final_channel() -> None:
    for thought in ("", f"{ANALYSIS}Hm.{NEXT}"):
        for found in (matcher(None, ASKED), matcher("auto", ASKED)):
            assert is_admitted(found, f'{thought}{FINAL}{{"a": 1}}')
        assert not is_admitted(matcher(None, ASKED), f'{thought}{{"a": 1}}')
        assert not is_admitted(matcher("auto", ASKED), f"{thought}{FINAL}a")


def test_a_named_call_is_led_to() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    found = matcher(NamedChoice.model_validate(named))
    assert is_admitted(found, f'{ANALYSIS}Hm.{NEXT}{CALL_HEAD}{{"city": "Ulm"}}', CALL)


def test_a_budget_closes_the_thought_with_the_marks_of_messages() -> None:
    found = matcher(budget=3)
    for token in VOCABULARY.tokenize_named(ANALYSIS + "abc"):
        assert token in allowed(found) and found.accept(token)
    for token in VOCABULARY.tokenize_named(NEXT, bpe=True):
        assert allowed(found) == {token} and found.accept(token)
    # Text that looks like the beginning of the mark is none: the mark follows as a whole.
    found = matcher(budget=3)
    for token in VOCABULARY.tokenize_named(ANALYSIS + "a<|"):
        assert found.accept(token)
    assert allowed(found) == {VOCABULARY.tokenize_named("<|end|>")[0]}
