"""Compares the answers that a schema's grammar admits with independent validators, over walks and given instances."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import jsonschema
import jsonschema_rs
import numpy as np

from rootgraft.api.structured.jsonschema_validators import FORMAT_CHECKER
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.match.matcher import GrammarFailure, Matcher
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

# Significant digits of a fraction that has a spelling of its own beside bounds.
MOST_DIGITS = 15
MOST_ORDERS = 60


@dataclass(frozen=True)
class Difference:
    """One place where the grammar and a validator disagree.

    Attributes:
        kind: "invalid walked", "invalid admitted", "valid refused", "stuck", "no end", "mask", "repeated key".
        detail: the text or instance that shows it.
    """

    kind: str
    detail: str


class Oracle:
    """Two validators of other authors, of the draft that the schema names, with formats asserted by the first."""

    def __init__(self, schema: Any) -> None:
        found = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        self._python = found(schema, format_checker=FORMAT_CHECKER)
        self._rust: Any = None
        if '"format"' in json.dumps(schema):
            return  # Its formats are other ones.
        with suppress(ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError):
            self._rust = jsonschema_rs.validator_for(schema)

    def verdict(self, value: Any) -> bool | None:
        """Return whether an instance is valid; None where the two disagree or one of them fails."""
        try:
            valid = self._python.is_valid(value)
        except Exception:
            return None
        if self._rust is not None and valid and not self._rust.is_valid(value):
            return None
        return valid

    def python(self, value: Any) -> bool:
        return bool(self._python.is_valid(value))

    def rust(self, value: Any) -> bool:
        return self._rust is None or bool(self._rust.is_valid(value))


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of an object as a dictionary. Raises a KeyError for a repeated key."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise KeyError(str(pairs))
    return found


class Walks:
    """Random walks of matchers over one vocabulary.

    Args:
        vocabulary: it has every byte as a token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._row = np.zeros(vocabulary.num_words, dtype=np.int32)
        self._bytes = {text[0]: token for token, text in reversed(list(enumerate(vocabulary.tokens))) if len(text) == 1}

    def likely(self, schema: Any) -> list[int]:
        """Return the tokens that consist of the characters of a schema, of digits and of JSON's own."""
        known = set(json.dumps(schema, ensure_ascii=False).encode()) | set(b'{}[],:"-.0123456789\\nullt')
        special = self.vocabulary.special
        return [
            i
            for i, text in enumerate(self.vocabulary.tokens)
            if text and i not in special and set(text) <= known and text.strip()
        ]

    def allowed(self, matcher: Matcher, remaining: int | None = None) -> list[int]:
        matcher.fill_mask(self._row, remaining)
        return np.flatnonzero(np.unpackbits(self._row.view(np.uint8), bitorder="little")).tolist()

    def admits(self, compiled: CompiledGrammar, text: str) -> bool:
        """Return whether a text is an answer, byte by byte."""
        matcher = compiled.matcher()
        return all(matcher.accept(self._bytes[byte]) for byte in text.encode()) and matcher.can_end

    def walk(
        self, compiled: CompiledGrammar, rng: random.Random, likely: list[int], free: int, budget: int
    ) -> str | None:
        """Return a random answer of ``free`` tokens and, within a budget, ``budget`` more; None if it was cut off.

        Raises:
            GrammarFailure: no token is allowed.
            AssertionError: a mask and the tokens that are accepted differ.
        """
        matcher, tokens, preferred = compiled.matcher(), bytearray(), set(likely)
        for step in range(free + budget):
            remaining = None if step < free else free + budget - step
            listed = self.allowed(matcher, remaining)
            if rng.random() < 0.01:
                self.check_mask(matcher, listed if remaining is None else self.allowed(matcher), rng)
            ends = matcher.can_end
            if ends and rng.random() < 0.5:
                return tokens.decode()
            near = [token for token in listed if token in preferred] if rng.random() < 0.9 else []
            token = rng.choice(near or listed)
            assert matcher.accept(token), f"mask: {token} after {bytes(tokens)!r}"
            if matcher.is_done:
                return tokens.decode()
            tokens += self.vocabulary.tokens[token]
        return tokens.decode() if matcher.can_end else None

    def check_mask(self, matcher: Matcher, listed: list[int], rng: random.Random) -> None:
        """Compare a mask with what is accepted, token by token, and longer tokens with their bytes."""
        vocabulary, found = self.vocabulary, set(listed)
        for token, text in enumerate(vocabulary.tokens):
            copy = matcher.copy()
            assert copy.accept(token) == (token in found), f"mask: token {text!r}"
            if len(text) > 1 and token not in vocabulary.special and token not in vocabulary.eos:
                copy = matcher.copy()
                by_bytes = all(copy.accept(self._bytes[byte]) for byte in text)
                assert by_bytes == (token in found), f"mask: token {text!r} and its bytes"


def spellings(value: Any, rng: random.Random) -> Iterator[str]:
    """Yield the texts of an instance as answers are spelled, with its keys in every order, of many only some."""
    orders = list(itertools.islice(_orders(value), 400))
    if len(orders) > MOST_ORDERS:
        orders = [orders[0], *rng.sample(orders[1:], MOST_ORDERS - 1)]
    yield from orders


def _orders(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for parts in itertools.product(*(list(itertools.islice(_orders(item), 24)) for item in value)):
            yield "[" + ",".join(parts) + "]"
    elif isinstance(value, dict):
        for items in itertools.permutations(value.items()):
            for parts in itertools.product(*(list(itertools.islice(_orders(item), 24)) for _, item in items)):
                pairs = (
                    json.dumps(key, ensure_ascii=False) + ":" + text
                    for (key, _), text in zip(items, parts, strict=True)
                )
                yield "{" + ",".join(pairs) + "}"
    elif isinstance(value, float):
        yield str(int(value)) if value == int(value) else format(Decimal(repr(value)), "f")
    else:
        yield json.dumps(value, ensure_ascii=False)


def is_short(value: Any) -> bool:
    """Return whether all fractions in an instance have few enough digits to be written beside bounds."""
    if isinstance(value, float) and value != int(value):
        return len(Decimal(repr(value)).as_tuple().digits) <= MOST_DIGITS and abs(value) > 1e-12
    if isinstance(value, int | float):
        return abs(value) < 1e40
    return all(map(is_short, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()))


def compiled_or_error(schema: Any, vocabulary: Vocabulary) -> CompiledGrammar | GrammarError:
    try:
        return compile(GrammarSpec.json_schema(schema), vocabulary)
    except GrammarError as error:
        return error


def differences(
    schema: dict[str, Any],
    compiled: CompiledGrammar,
    walks: Walks,
    instances: list[Any],
    rng: random.Random,
    num_walks: int,
) -> Iterator[Difference]:
    """Yield what differs between a grammar and the validators: over random answers, and over given instances."""
    oracle = Oracle(schema)
    likely = walks.likely(schema)
    for _ in range(num_walks):
        try:
            text = walks.walk(compiled, rng, likely, rng.choice((0, 3, 10, 25)), 150)
        except GrammarFailure as failure:
            yield Difference("stuck", str(failure))
            continue
        except AssertionError as error:
            yield Difference("mask", str(error))
            continue
        if text is None:
            yield Difference("no end", "")
            continue
        yield from _walked(oracle, text)
    for value in instances:
        yield from _given(oracle, compiled, walks, value, rng)


def _walked(oracle: Oracle, text: str) -> Iterator[Difference]:
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except KeyError:
        yield Difference("repeated key", text)
        return
    except ValueError:
        yield Difference("no JSON", text)
        return
    try:
        if not oracle.python(value):
            yield Difference("invalid walked", text)
        elif not oracle.rust(value):
            yield Difference("invalid walked (rust)", text)
    except Exception as error:
        yield Difference("oracle failed", f"{error!r} at {text}"[:200])


def _given(
    oracle: Oracle, compiled: CompiledGrammar, walks: Walks, value: Any, rng: random.Random
) -> Iterator[Difference]:
    verdict = oracle.verdict(value)
    if verdict is None:
        return
    admitted = any(walks.admits(compiled, text) for text in spellings(value, rng))
    if admitted and not verdict:
        yield Difference("invalid admitted", json.dumps(value, ensure_ascii=False))
    elif verdict and not admitted and is_short(value):
        yield Difference("valid refused", json.dumps(value, ensure_ascii=False))
