"""Generated schemas that mix keywords, against two validators: no wrong answer, no valid one refused unnoticed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from support.grammar.mixed_schemas import Instances, SchemaDraw
from support.grammar.schema_differential import Walks, compiled_or_error, differences
from support.machine.thoroughness import repeats

from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.vocabulary import Vocabulary

DRAFTS = (2020, 2020, 2020, 2020, 2019, 7, 7, 6, 4)


def check(vocabulary: Vocabulary, seed: int) -> bool:
    """Compare what a seed's schema admits with the validators; return whether it was accepted."""
    rng = random.Random(seed)
    schema = SchemaDraw(rng, rng.choice(DRAFTS)).schema()
    compiled = compiled_or_error(schema, vocabulary)
    if isinstance(compiled, GrammarError):
        assert compiled.keyword and compiled.reason
        return False
    instances = Instances(schema, rng)
    values: list[Any] = list({json.dumps(each): each for each in (instances.draw() for _ in range(8))}.values())
    for found in differences(schema, compiled, Walks(vocabulary), values, rng, 2):
        # Answers may be fewer where the analysis says so, and an answer of many nested parts may be cut off.
        if found.kind != "no end" and not (found.kind == "valid refused" and compiled.artifact.narrowings):
            raise AssertionError((seed, json.dumps(schema), found))
    return True


def test_what_mixed_keywords_admit_is_what_the_validators_do(vocabulary):
    seeds = range(repeats(60))
    assert sum(check(vocabulary, seed) for seed in seeds) > len(seeds) // 3


@pytest.mark.heavy
def test_what_many_more_mixes_admit_is_what_the_validators_do(vocabulary):
    seeds = range(1_000, 1_000 + repeats(900))
    assert sum(check(vocabulary, seed) for seed in seeds) > len(seeds) // 3
