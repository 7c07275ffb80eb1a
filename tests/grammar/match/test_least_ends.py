"""The budget excludes what no longer fits, and nothing else: compared with brute force over all ends that fit.

The oracle knows nothing of how an end is searched: it follows the grammar's matcher through all texts, shortest first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.match.matcher import Matcher
from rootgraft.grammar.spec import GrammarKind, GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

MOST_TEXTS = 60_000
LETTERS = "abxyé"


def random_vocabulary(rng: random.Random) -> Vocabulary:
    """Every byte, and some pieces of JSON and of words."""
    pieces = ['{"', '":', '":"', '","', '"}', '"]', "],", '["', "},", "true", "null", ", ", ": ", '": "', "e,", ' "']
    pieces += ["".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 4))) for _ in range(12)]
    chosen = dict.fromkeys(rng.sample(pieces, rng.randint(4, len(pieces))))
    tokens = (*(bytes((byte,)) for byte in range(256)), *(piece.encode() for piece in chosen), b"<end>")
    return Vocabulary(tokens, frozenset((len(tokens) - 1,)), (len(tokens) - 1,))


def random_word(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 5)))


def random_choice(rng: random.Random) -> GrammarSpec:
    return GrammarSpec.choice(sorted({random_word(rng) for _ in range(rng.randint(1, 6))}))


def random_pattern(rng: random.Random, depth: int = 2) -> str:
    kind = rng.randrange(5 if depth else 2)
    if kind == 0:
        return random_word(rng)
    if kind == 1:
        return f"[{''.join(sorted(set(random_word(rng))))}]"
    if kind == 2:
        return "".join(random_pattern(rng, depth - 1) for _ in range(2))
    if kind == 3:
        return f"({random_pattern(rng, depth - 1)}|{random_pattern(rng, depth - 1)})"
    return f"({random_pattern(rng, depth - 1)}){rng.choice(['?', '*', '+', '{2}', '{1,3}'])}"


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose strings are listed or of a few letters."""
    match rng.randrange(8 if depth else 5):
        case 0:
            return {"enum": [random_word(rng) for _ in range(rng.randint(1, 4))]}
        case 1:
            return {"type": "boolean"}
        case 2:
            return {"enum": [None, True, rng.randint(0, 200), random_word(rng)]}
        case 3:
            return {"type": "integer", "minimum": 8, "maximum": rng.choice([9, 12, 120])}
        case 4:
            if rng.random() < 0.5:
                return {"type": "string", "pattern": f"^({random_pattern(rng, 1)})$"}
            return {"type": "string", "pattern": "^[ab]+$", "minLength": rng.randint(0, 3), "maxLength": 4}
        case 5:
            return {
                "type": "array",
                "items": random_schema(rng, depth - 1),
                "minItems": rng.randint(0, 2),
                "maxItems": 3,
            }
        case 6:
            return {"anyOf": [random_schema(rng, depth - 1), random_schema(rng, depth - 1)]}
        case _:
            names = sorted({random_word(rng) for _ in range(rng.randint(1, 3))})
            required = [name for name in names if rng.random() < 0.7]
            properties = {name: random_schema(rng, depth - 1) for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = sorted({random_word(rng) for _ in range(rng.randint(1, 3))})
    properties = {name: random_schema(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def random_kinds(rng: random.Random) -> dict[str, Any]:
    """A schema where a value may be one of several kinds of objects and arrays."""
    match rng.randrange(4):
        case 0:
            return {"anyOf": [random_object(rng, 1) for _ in range(rng.randint(2, 3))]}
        case 1:
            items, least = random_schema(rng, 1), rng.randint(0, 2)
            array = {"type": "array", "items": items, "minItems": least, "maxItems": 3}
            return {"anyOf": [random_object(rng, 1), array, random_schema(rng, 0)]}
        case 2:
            items = {"anyOf": [random_object(rng, 0) for _ in range(2)]}
            return {"type": "array", "items": items, "minItems": 1, "maxItems": 2}
        case _:
            name, kinds = random_word(rng), {"anyOf": [random_object(rng, 0) for _ in range(2)]}
            return {"type": "object", "properties": {name: kinds}, "required": [name], "additionalProperties": False}


def kinds_specs(seed: int) -> Iterator[tuple[GrammarSpec, Vocabulary]]:
    rng = random.Random(seed)
    vocabulary = random_vocabulary(rng)
    yield GrammarSpec.json_schema(random_kinds(rng)), vocabulary


def random_long(rng: random.Random) -> dict[str, Any]:
    """A schema whose values take several tokens."""
    length = rng.randint(3, 7)
    match rng.randrange(6):
        case 0:
            return {"type": "string", "pattern": f"^[ab]{{{length},{length + 2}}}$"}
        case 1:
            return {"const": "".join(rng.choice(LETTERS) for _ in range(length + 3))}
        case 2:
            return {"enum": [random_word(rng) + random_word(rng) for _ in range(3)]}
        case 3:
            return {
                "type": "array",
                "items": {"enum": [random_word(rng)]},
                "minItems": rng.randint(1, 3),
                "maxItems": 3,
            }
        case 4:
            return {"type": "integer", "minimum": 10**length, "maximum": 10**length + 3}
        case _:
            properties = {random_word(rng): {"enum": [1, True]}}
            return {"type": "object", "properties": properties, "additionalProperties": False, "minProperties": 1}


def random_nullable(rng: random.Random) -> dict[str, Any]:
    """A value that is null, or another short one, or a long one."""
    long = random_long(rng)
    short = rng.choice([{"type": "null"}, {"type": "boolean"}, {"const": ""}, {"const": 1}, {"const": "a"}])
    if rng.random() < 0.3 and "type" in long:
        return {**long, "type": [long["type"], "null"]}
    return {"anyOf": rng.sample([long, short], 2)}


def nullable_specs(seed: int) -> Iterator[tuple[GrammarSpec, Vocabulary]]:
    """Values, items and members, some optional, of a short and a long kind."""
    rng = random.Random(seed)
    vocabulary = random_vocabulary(rng)
    names = sorted({random_word(rng) for _ in range(rng.randint(1, 3))})
    properties = {name: random_nullable(rng) if rng.random() < 0.8 else {"enum": [1, 2]} for name in names}
    required = [name for name in names if rng.random() < 0.5]
    members = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    items = {"type": "array", "items": random_nullable(rng), "minItems": rng.randint(0, 2), "maxItems": 2}
    yield GrammarSpec.json_schema(rng.choice([random_nullable(rng), items, members, members])), vocabulary


class Oracle:
    """The fewest tokens to an end, by following the grammar through all texts, one more token at a time."""

    def __init__(self, vocabulary: Vocabulary, blank: bool) -> None:
        self._vocabulary = vocabulary
        self._row = np.zeros(vocabulary.num_words, dtype=np.int32)
        # A token of white space alone leads nowhere that cannot be reached without it.
        self._left_out = {i for i, text in enumerate(vocabulary.tokens) if blank and not text.strip()}
        self.num_texts = 0

    def allowed(self, matcher: Matcher) -> list[int]:
        matcher.fill_mask(self._row)
        return np.flatnonzero(np.unpackbits(self._row.view(np.uint8), bitorder="little")).tolist()

    def fits(self, matcher: Matcher, most: int) -> bool:
        """Whether an end of at most so many tokens follows."""
        texts = {b"": matcher}
        for left in range(most, -1, -1):
            if any(each.can_end for each in texts.values()):
                return True
            after: dict[bytes, Matcher] = {}
            for text, each in texts.items() if left else ():
                for token in self.allowed(each):
                    key = text + self._vocabulary.tokens[token]
                    if token in self._vocabulary.eos or token in self._left_out or key in after or key in texts:
                        continue
                    self.num_texts += 1
                    if self.num_texts > MOST_TEXTS:
                        raise TimeoutError
                    after[key] = each.copy()
                    assert after[key].accept(token)
            texts = after
        return False


def specs(seed: int) -> Iterator[tuple[GrammarSpec, Vocabulary]]:
    rng = random.Random(seed)
    vocabulary = random_vocabulary(rng)
    yield random_choice(rng), vocabulary
    yield GrammarSpec.regex(random_pattern(rng)), vocabulary
    yield GrammarSpec.json_schema(random_schema(rng)), vocabulary


Specs: TypeAlias = Callable[[int], Iterator[tuple[GrammarSpec, Vocabulary]]]


class Comparison:
    """Counts of positions that were compared with the oracle."""

    def __init__(self) -> None:
        self.equal = self.left_out = 0

    def follow(self, spec: GrammarSpec, vocabulary: Vocabulary, rng: random.Random) -> None:
        """Follow answers at small budgets; the allowed tokens are those after which the oracle finds an end."""
        compiled, is_json = compile(spec, vocabulary), spec.kind is GrammarKind.JSON_SCHEMA
        self._oracle, self._row = Oracle(vocabulary, is_json), np.zeros(vocabulary.num_words, dtype=np.int32)
        shortest = compiled.matcher().num_shortest or 0
        assert self._oracle.fits(compiled.matcher(), shortest)
        assert not self._oracle.fits(compiled.matcher(), shortest - 1)
        for budget in range(max(1, shortest), shortest + 4):
            matcher = compiled.matcher()
            for remaining in range(budget, 0, -1):
                found = self._compare(matcher, remaining)
                assert matcher.accept(rng.choice(sorted(found)))
                if matcher.is_done:
                    break
            assert matcher.can_end

    def _compare(self, matcher: Matcher, remaining: int) -> set[int]:
        expected = set()
        for token in self._oracle.allowed(matcher.copy()):
            after = matcher.copy()
            assert after.accept(token)
            if after.is_done or self._oracle.fits(after, remaining - 1):
                expected.add(token)
        matcher.fill_mask(self._row, remaining)
        found = set(np.flatnonzero(np.unpackbits(self._row.view(np.uint8), bitorder="little")).tolist())
        assert found == expected
        self.equal += 1
        return found


def compared(seeds: Iterable[int], specs: Specs = specs) -> Comparison:
    comparison = Comparison()
    for seed in seeds:
        for spec, vocabulary in specs(seed):
            try:
                comparison.follow(spec, vocabulary, random.Random(seed))
            except TimeoutError:
                comparison.left_out += 1
    return comparison


def test_the_tokens_that_fit_are_those_of_brute_force():
    comparison = compared(range(6))
    assert comparison.equal > 100 and comparison.left_out <= 2


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(3))
def test_the_tokens_that_fit_are_those_of_brute_force_for_many_grammars(part):
    comparison = compared(range(100 + 11 * part, 100 + 11 * (part + 1)))
    assert comparison.equal > 250 and comparison.left_out <= 4


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [1024, 1049, 1057, 1091, 1207, 3027])
def test_a_longer_text_of_fewer_tokens_ends_an_answer(seed):
    """Strings of a pattern, enumerations and spellings with blanks of which the shortest one has more tokens."""
    comparison = compared([seed])
    assert comparison.equal > 20 and comparison.left_out <= 1


def test_an_end_by_another_kind_of_object_fits():
    """The first kind that a search begins with takes more tokens than are left, or another one has been begun."""
    comparison = compared([25], kinds_specs)
    assert comparison.equal > 30 and not comparison.left_out


@pytest.mark.heavy
@pytest.mark.parametrize("seeds", [(6, 25, 29), (58, 126, *range(8, 14))])
def test_the_tokens_that_fit_are_those_of_brute_force_for_several_kinds_of_objects_and_arrays(seeds):
    comparison = compared(seeds, kinds_specs)
    assert comparison.equal > 140 and comparison.left_out <= 3


def test_an_optional_or_nullable_value_is_begun_only_if_its_end_fits():
    """Null beside a long string at the exact budget: the string goes when none fits, and not before."""
    comparison = compared([22], nullable_specs)
    assert comparison.equal > 10 and not comparison.left_out


@pytest.mark.heavy
@pytest.mark.parametrize("seeds", [(18, 21), range(30, 34), range(60, 64)])
def test_the_tokens_that_fit_are_those_of_brute_force_for_short_and_long_values(seeds):
    comparison = compared(seeds, nullable_specs)
    assert comparison.equal > 40 and comparison.left_out <= 2
