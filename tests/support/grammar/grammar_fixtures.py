"""Vocabularies for the grammar tests: bytes with a few longer tokens, and the real one."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from rfc3987_syntax import is_valid_syntax

from benchmarks.grammar.limited_walk import draw_within
from benchmarks.grammar.spelling import MISSING, spell
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.grammar.compile import compiled_grammar
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.match.matcher import Matcher
from rootgraft.grammar.schema.analysis import Analysis
from rootgraft.grammar.schema.document import Document
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary


def _is_iri(instance: object, *, rule: str) -> bool:
    return not isinstance(instance, str) or is_valid_syntax(rule, instance)


# Where the server was imported first, jsonschema did not find this package: the server leaves its seconds aside.
for each in ("iri", "iri-reference"):
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    checker.checks(each, ValueError)(partial(_is_iri, rule=each.replace("-", "_")))

KEPT = 32
"""Compiled schemas that ``StructuredOutputManager`` keeps."""

LONGER = (
    b'{"',
    b'":',
    b'", "',
    b'"}',
    b"}}",
    b"true",
    b"null",
    b"ab",
    b"aaa",
    b"12",
    b"000",
    b"  ",
    b"\n  ",
    b'""',
    b"[]",
)


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """Every byte, some longer tokens, a special token and two end tokens."""
    tokens = (*(bytes([byte]) for byte in range(256)), *LONGER, b"<tool>", b"<end>", b"<stop>")
    size = len(tokens)
    return Vocabulary(tokens, frozenset((size - 3, size - 2, size - 1)), (size - 2, size - 1), size + 5)


@pytest.fixture(scope="session")
def real_vocabulary(smollm2_gguf: Path) -> Vocabulary:
    """SmolLM2's 49,152 tokens."""
    tokenizer = Tokenizer.load(smollm2_gguf)
    tokens = tuple(tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
    return Vocabulary(tokens, frozenset(tokenizer.special_ids), tokenizer.eos_ids)


class StructuredOutputManager:
    """Compiles, walks and draws, checking mask against accept all along."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.row = np.zeros(vocabulary.num_words, dtype=np.int32)
        self._compiled: OrderedDict[tuple[str, int], CompiledGrammar] = OrderedDict()

    def schema(self, schema: Any) -> CompiledGrammar:
        """Compile a schema, or return what the same one was compiled to, as the engine's cache does.

        Generated examples ask for few schemas again and again, and compiling takes longer than most walks.
        """
        spec = GrammarSpec.json_schema(schema)
        key = spec.content, id(compiled_grammar._LARGER_LIMITS)
        if key not in self._compiled:
            self._compiled[key] = compile(spec, self.vocabulary)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]

    def allowed(self, matcher: Matcher, remaining: int | None = None) -> set[int]:
        matcher.fill_mask(self.row, remaining)
        return set(np.flatnonzero(np.unpackbits(self.row.view(np.uint8), bitorder="little")).tolist())

    def admits(self, compiled: CompiledGrammar, text: str | bytes) -> bool:
        data = text.encode() if isinstance(text, str) else text
        matcher = compiled.matcher()
        for token in self.vocabulary.tokenize(data):
            matcher.fill_mask(self.row)
            allowed = bool(int(self.row[token >> 5]) >> (token & 31) & 1)
            assert matcher.accept(token) == allowed
            if not allowed:
                return False
        return matcher.can_end

    def admits_value(self, schema: Any, compiled: CompiledGrammar, value: Any) -> bool:
        """Whether an instance can be produced, with its keys as given or in the order of the schema."""
        if self.admits(compiled, json.dumps(value, ensure_ascii=False)):
            return True
        ordered = spell(Analysis(Document(schema)), frozenset((0,)), value)
        return ordered is not MISSING and self.admits(compiled, json.dumps(ordered, ensure_ascii=False))

    def draw(self, matcher: Matcher, rng: Any, budget: int) -> bytes | None:
        """A random answer within a budget, drawn as the sampler does; None if it was cut off."""
        text = b""
        for step in range(budget):
            token = draw_within(matcher, self.row, budget - step, lambda left: int(left[rng.randrange(len(left))]))
            assert matcher.accept(token)
            if matcher.is_done:
                return text
            text += self.vocabulary.tokens[token]
        return text if matcher.can_end else None

    def walk_back_and_forth(self, compiled: CompiledGrammar, matcher: Matcher, tokens: list[int], back: int) -> None:
        """Accept and take back tokens at random; after each time the matcher is as a fresh one after ``tokens``.

        Args:
            tokens: those that the matcher has accepted; kept up to date.
            back: most tokens taken back at a time.
        """
        rng = random.Random(5)
        for _ in range(40):
            for _ in range(rng.randint(0, 5)):
                if matcher.is_done:
                    break
                tokens.append(rng.choice(sorted(self.allowed(matcher))))
                assert matcher.accept(tokens[-1])
            count = rng.randint(0, min(back, len(tokens)))
            matcher.rollback(count)
            del tokens[len(tokens) - count :]
            fresh = compiled.matcher()
            assert all(map(fresh.accept, tokens))
            assert fresh.is_done == matcher.is_done and fresh.can_end == matcher.can_end
            assert self.allowed(fresh) == self.allowed(matcher) == self.allowed(matcher.copy())


@pytest.fixture(scope="session")
def grammars(vocabulary: Vocabulary) -> StructuredOutputManager:
    """`StructuredOutputManager` over the small vocabulary."""
    return StructuredOutputManager(vocabulary)


@pytest.fixture(scope="session")
def real_grammars(real_vocabulary: Vocabulary) -> StructuredOutputManager:
    """`StructuredOutputManager` over the real vocabulary."""
    return StructuredOutputManager(real_vocabulary)


@pytest.fixture
def hardly_larger_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that meets the library's limits meets the larger ones soon after, not seconds later."""
    limits = llguidance.LLParserLimits(verbose_errors=False, step_max_items=2_000, step_lexer_fuel=200_000)
    monkeypatch.setattr(compiled_grammar, "_LARGER_LIMITS", limits)
