"""The budget excludes what no longer fits, and nothing else: compared with brute force over all ends that fit.

The oracle knows nothing of how an end is searched: it follows the grammar's matcher through all texts, shortest first.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest
from support.grammar.end_oracle import EndOracle
from support.grammar.small_languages import Specs, kinds_specs, nullable_specs, specs
from support.machine.thoroughness import taking_turns

from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.spec import GrammarKind, GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary


class Comparison:
    """Counts of positions that were compared with the oracle."""

    def __init__(self) -> None:
        self.equal = self.left_out = 0

    def follow(self, spec: GrammarSpec, vocabulary: Vocabulary, rng: random.Random) -> None:
        """Follow answers at small budgets; the allowed tokens are those after which the oracle finds an end."""
        compiled, row = compile(spec, vocabulary), np.zeros(vocabulary.num_words, dtype=np.int32)
        oracle = EndOracle(compiled.matcher(), vocabulary, blank=spec.kind is GrammarKind.JSON_SCHEMA)
        shortest = compiled.matcher().num_shortest or 0
        assert oracle.fits(b"", shortest) and not oracle.fits(b"", shortest - 1)
        for budget in range(max(1, shortest), shortest + 4):
            matcher, text = compiled.matcher(), b""
            for remaining in range(budget, 0, -1):
                matcher.fill_mask(row, remaining)
                found = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
                assert found == oracle.fitting(text, remaining)
                self.equal += 1
                token = rng.choice(sorted(found))
                assert matcher.accept(token)
                if matcher.is_done:
                    break
                text += vocabulary.tokens[token]
            assert matcher.can_end


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
@pytest.mark.parametrize("part", taking_turns(range(3), 3))
def test_the_tokens_that_fit_are_those_of_brute_force_for_many_grammars(part):
    comparison = compared(range(100 + 11 * part, 100 + 11 * (part + 1)))
    assert comparison.equal > 250 and comparison.left_out <= 4


@pytest.mark.heavy
@pytest.mark.parametrize("seed", taking_turns([1024, 1049, 1057, 1091, 1207, 3027], 3))
def test_a_longer_text_of_fewer_tokens_ends_an_answer(seed):
    """Strings of a pattern, enumerations and spellings with blanks of which the shortest one has more tokens."""
    comparison = compared([seed])
    assert comparison.equal > 20 and comparison.left_out <= 1


def test_an_end_by_another_kind_of_object_fits():
    """The first kind that a search begins with takes more tokens than are left, or another one has been begun."""
    comparison = compared([25], kinds_specs)
    assert comparison.equal > 30 and not comparison.left_out


@pytest.mark.heavy
@pytest.mark.parametrize("seeds", taking_turns([(6, 25, 29), (58, 126, *range(8, 14))], 2))
def test_the_tokens_that_fit_are_those_of_brute_force_for_several_kinds_of_objects_and_arrays(seeds):
    comparison = compared(seeds, kinds_specs)
    assert comparison.equal > 140 and comparison.left_out <= 3


def test_an_optional_or_nullable_value_is_begun_only_if_its_end_fits():
    """Null beside a long string at the exact budget: the string goes when none fits, and not before."""
    comparison = compared([22], nullable_specs)
    assert comparison.equal > 10 and not comparison.left_out


@pytest.mark.heavy
@pytest.mark.parametrize("seeds", taking_turns([(18, 21), range(30, 34), range(60, 64)], 3))
def test_the_tokens_that_fit_are_those_of_brute_force_for_short_and_long_values(seeds):
    comparison = compared(seeds, nullable_specs)
    assert comparison.equal > 40 and comparison.left_out <= 2
