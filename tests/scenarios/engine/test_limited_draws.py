"""Near its budget an answer is drawn as by brute force over all ends that fit, of random schemas, regexes and choices.

The sampler draws by logits that have nothing to do with the grammar: far harder than a model that has learned JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from support.grammar.end_oracle import EndOracle
from support.grammar.small_languages import mixed_spec
from support.machine.thoroughness import is_thorough, taking_turns

from rootgraft.engine.batch import Row, RowStart
from rootgraft.engine.sampling.draft_verify import sampling_positions
from rootgraft.engine.sampling.sampler import DeviceMasks, Sampler
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.match.budget_close import BudgetCheck
from rootgraft.grammar.spec import GrammarKind

# Budgets above the least one, and texts beyond which brute force takes too long.
MORE_BUDGETS = 5
MOST_TEXTS = 10_000
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)


@dataclass
class Draws:
    """What was compared with brute force, and what was not the same.

    Attributes:
        num_positions: places in answers at which draws were compared.
        num_left_out: languages of which brute force did not come to an end.
        unequal: seed, budget, text so far, token and wanted token of greedy draws that were none of brute force: a draw
            tests no more than so many tokens, and takes one that is known to fit if none of these did.
    """

    num_positions: int = 0
    num_left_out: int = 0
    unequal: list[tuple[Any, ...]] = field(default_factory=list)

    def follow(self, seed: int) -> None:
        """Draw answers of the language of a seed at each budget from the least one on."""
        spec, vocabulary = mixed_spec(seed)
        compiled, sampler = compile(spec, vocabulary), Sampler(1, vocabulary.size, torch.device("cpu"))
        is_json = spec.kind is GrammarKind.JSON_SCHEMA
        oracle = EndOracle(compiled.matcher(), vocabulary, blank=is_json, most_texts=MOST_TEXTS)
        random_numbers, row = np.random.default_rng(seed), np.zeros(vocabulary.num_words, dtype=np.int32)
        # An expression that allows the empty text has no shortest answer of its own.
        shortest = compiled.matcher().num_shortest or 0
        assert oracle.least(b"", shortest) == shortest, (seed, shortest)
        for budget in range(max(1, shortest), shortest + MORE_BUDGETS):
            matcher, text = compiled.matcher(), b""
            for remaining in range(budget, 0, -1):
                check = matcher.fill_grammar_mask(row, remaining)
                expected = oracle.fitting(text, remaining)
                limits = row if check is None else check.limits()
                place = seed, budget, text
                assert set(np.flatnonzero(np.unpackbits(limits.view(np.uint8), bitorder="little"))) == expected, place
                logits = torch.from_numpy(random_numbers.normal(0, 3, vocabulary.size).astype(np.float32))
                wanted = max(expected, key=lambda token: float(logits[token]))
                token = drawn(sampler, logits, row, check, GREEDY, 0)
                if token != wanted:
                    self.unequal.append((*place, vocabulary.tokens[token], vocabulary.tokens[wanted]))
                token = drawn(sampler, logits, row, check, DRAWN, int(random_numbers.integers(1 << 40)))
                assert token in expected, place
                self.num_positions += 1
                assert matcher.accept(token)
                if matcher.is_done:
                    break
                text += vocabulary.tokens[token]
            assert matcher.can_end, (seed, budget, text)


def drawn(
    sampler: Sampler,
    logits: torch.Tensor,
    row: np.ndarray,
    check: BudgetCheck | None,
    params: SamplingParams,
    seed: int,
) -> int:
    """Return the token that the sampler draws under a mask and a check."""
    sampler.start([RowStart(0, params, [1], 1, (), seed)])
    positions = sampling_positions([Row(0, 0, [1], 0, (), True, 0)], {})
    checks = {} if check is None else {0: check}
    masks = DeviceMasks(torch.tensor([0]), torch.from_numpy(row[None].copy()), checks)
    [result] = sampler.collect(sampler.draw(logits[None].clone(), positions, masks))
    return result.tokens[0]


def compared(seeds: Iterable[int]) -> Draws:
    draws = Draws()
    for seed in seeds:
        try:
            draws.follow(seed)
        except TimeoutError:
            draws.num_left_out += 1
    return draws


@pytest.mark.sample
def test_draws_near_the_budget_are_those_of_brute_force():
    draws = compared(range(20))
    assert draws.num_positions > 400 and draws.num_left_out <= 5
    assert not draws.unequal


@pytest.mark.heavy
def test_draws_near_the_budget_are_those_of_brute_force_for_many_languages():
    """A thousand languages in a thorough run, and twenty of forty in turns."""
    seeds = range(20, 1020) if is_thorough() else taking_turns(range(20, 60), 2)
    draws = compared(seeds)
    assert draws.num_left_out <= len(seeds) / 5
    assert len(draws.unequal) <= draws.num_positions / 1000, draws.unequal
