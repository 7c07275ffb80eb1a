"""Generated schemas that mix keywords, against two validators: no wrong answer, no valid one refused unnoticed."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from support.grammar.mixed_schemas import Instances, SchemaDraw
from support.grammar.schema_differential import Difference, Walks, compiled_or_error, differences
from support.machine.thoroughness import repeats

from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.vocabulary import Vocabulary

DRAFTS = (2020, 2020, 2020, 2020, 2019, 7, 7, 6, 4)


def is_documented(schema: str, draft: int, found: Difference, compiled: CompiledGrammar) -> bool:
    """Return whether answers are fewer than a validator's as the page on keywords says, or an answer was cut off.

    Keywords of other drafts count where they make answers fewer; patterns are those of ECMA 262, where ``\\w`` is ASCII
    and ``$`` is before no line break; multiples of fractions are multiples by doubles too.
    """
    if found.kind == "no end":
        return True
    is_plain = found.detail.isascii() and "\\u" not in found.detail and "\\n" not in found.detail
    is_exact = is_plain and draft == 2020 and not re.search(r'"multipleOf": \d*\.', schema)
    return found.kind == "valid refused" and (bool(compiled.artifact.narrowings) or not is_exact)


def check(vocabulary: Vocabulary, seed: int) -> bool:
    """Compare what a seed's schema admits with the validators; return whether it was accepted."""
    rng = random.Random(seed)
    draft = rng.choice(DRAFTS)
    schema = SchemaDraw(rng, draft).schema()
    compiled = compiled_or_error(schema, vocabulary)
    if isinstance(compiled, GrammarError):
        assert compiled.keyword and compiled.reason
        return False
    instances = Instances(schema, rng)
    values: list[Any] = list({json.dumps(each): each for each in (instances.draw() for _ in range(8))}.values())
    for found in differences(schema, compiled, Walks(vocabulary), values, rng, 2):
        text = json.dumps(schema)
        assert is_documented(text, draft, found, compiled), (seed, text, found)
    return True


def test_what_mixed_keywords_admit_is_what_the_validators_do(vocabulary):
    seeds = range(repeats(60))
    assert sum(check(vocabulary, seed) for seed in seeds) > len(seeds) // 3


@pytest.mark.heavy
def test_what_many_more_mixes_admit_is_what_the_validators_do(vocabulary):
    seeds = range(1_000, 1_000 + repeats(900))
    assert sum(check(vocabulary, seed) for seed in seeds) > len(seeds) // 3
