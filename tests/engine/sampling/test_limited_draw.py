"""A token that does not fit is drawn again: each that fits has its share of what the filters keep, greedy the best."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from support.grammar.grammar_fixtures import grammars, vocabulary
from support.grammar.schema_cases import SCHEMAS

from rootgraft.engine.batch import Row, RowStart
from rootgraft.engine.sampling.draft_verify import sampling_positions
from rootgraft.engine.sampling.limited_draw import MAX_TRIES, LimitedLines
from rootgraft.engine.sampling.sampler import _ROW, DeviceMasks, Sampler
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.match import budget_close
from rootgraft.grammar.match.backends import LlguidanceBackend
from rootgraft.grammar.match.matcher import Matcher

__all__ = ("grammars", "vocabulary")

VOCAB = 70
DRAWS = 800


class FakeCheck:
    """Some tokens fit; neighbours of two are alike.

    Args:
        known: those that are known to fit without a test; all if None.
        cost: of the test of each token.
    """

    def __init__(self, fitting: set[int], known: set[int] | None = None, cost: int = 0) -> None:
        self.fitting = fitting
        self._known = fitting if known is None else known
        self._cost = cost
        self.num_tests = 0

    def fits(self, token: int) -> bool:
        self.num_tests += 1
        return token in self.fitting

    def alike(self, token: int) -> np.ndarray:
        pair = {token, token ^ 1}
        return np.array(sorted(pair if pair.isdisjoint(self.fitting) or pair <= self.fitting else {token}))

    def costs(self, token: int) -> dict[int, int]:
        return {token: self._cost}

    def known(self) -> np.ndarray:
        return self._mask(self._known)

    def limits(self) -> np.ndarray:
        return self._mask(self.fitting)

    def _mask(self, tokens: set[int]) -> np.ndarray:
        bits = np.zeros(96, dtype=np.bool_)
        bits[sorted(tokens)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


def draw(logits: torch.Tensor, fitting: set[int] | FakeCheck, seeds: range, **params) -> list:
    check = fitting if isinstance(fitting, FakeCheck) else FakeCheck(fitting)
    sampler = Sampler(1, VOCAB, torch.device("cpu"))
    results = []
    everything = torch.from_numpy(np.full((1, 3), -1, dtype=np.int32))
    for seed in seeds:
        sampler.start([RowStart(0, SamplingParams(**params), [1], 1, (), seed)])
        positions = sampling_positions([Row(0, 0, [1], 0, (), True, 0)], {})
        masks = DeviceMasks(torch.tensor([0]), everything, {0: check})
        results += sampler.collect(sampler.draw(logits[None].clone(), positions, masks))
    return results


def line() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).normal(0, 1.5, VOCAB).astype(np.float32))


def test_a_greedy_draw_is_the_likeliest_that_fits():
    logits = line()
    order = logits.argsort(descending=True).tolist()
    for number in (1, 2, 7, 69):
        [result] = draw(logits, set(order[number:]), range(1), temperature=0.0)
        assert result.tokens == (order[number],) and result.is_limited
    [result] = draw(logits, {order[0], order[5]}, range(1), temperature=0.0)
    assert result.tokens == (order[0],) and not result.is_limited


@pytest.mark.parametrize("params", [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9}])
@pytest.mark.parametrize("every", [2, 5])
def test_each_token_that_fits_has_its_share(params, every):
    """Of the probability of all that the filters keep and that fit; chi-squared against the exact shares."""
    logits = line()
    free = Counter(result.tokens[0] for result in draw(logits, set(range(VOCAB)), range(DRAWS), **params))
    fitting = {token for token in range(VOCAB) if token // 2 % every == 0}
    found = Counter(result.tokens[0] for result in draw(logits, fitting, range(DRAWS, 2 * DRAWS), **params))
    assert set(found) <= fitting
    probs = torch.softmax(logits.double(), 0).numpy()
    kept = {token: probs[token] for token in free if token in fitting}
    total = sum(kept.values())
    expected = {token: DRAWS * prob / total for token, prob in kept.items()}
    large = [token for token, count in expected.items() if count >= 8]
    statistic = sum((found[token] - expected[token]) ** 2 / expected[token] for token in large)
    assert statistic < len(large) + 5 * (2 * len(large)) ** 0.5


def test_what_no_filter_keeps_is_drawn_if_nothing_else_fits():
    logits = line()
    worst = int(logits.argmin())
    for result in draw(logits, {worst}, range(20), top_k=3):
        assert result.tokens == (worst,) and result.is_limited


def test_without_excluded_tokens_a_draw_is_the_same_as_without_a_budget():
    logits = line()
    limited = draw(logits, set(range(VOCAB)), range(300))
    sampler = Sampler(1, VOCAB, torch.device("cpu"))
    for seed, result in zip(range(300), limited, strict=True):
        sampler.start([RowStart(0, SamplingParams(), [1], 1, (), seed)])
        [plain] = sampler.sample(logits[None].clone(), [Row(0, 0, [1], 0, (), True, 0)])
        assert plain.tokens == result.tokens and not result.is_limited


def test_logprobs_are_those_of_the_token_that_was_drawn_again():
    logits = line()
    order = logits.argsort(descending=True).tolist()
    [result] = draw(logits, {order[4]}, range(1), temperature=0.0, logprobs=2)
    expected = float(torch.log_softmax(logits.double(), 0)[order[4]])
    assert result.tokens == (order[4],) and result.logprobs[0].token == order[4]
    assert result.logprobs[0].logprob == pytest.approx(expected, abs=1e-4) and result.logprobs[0].rank == 5


@pytest.mark.parametrize("spare", [0, 1])
def test_when_the_tests_have_cost_too_much_a_token_is_drawn_that_is_known_to_fit(spare):
    """Tests that cost as much as a draw may are the last but one; with one more each, the last one comes earlier."""
    logits, num_tests = line(), 8
    order = logits.argsort(descending=True).tolist()
    wrong = order[:40:2]  # one of each pair of neighbours in rank
    fitting = set(range(VOCAB)) - set(wrong) - {token ^ 1 for token in wrong}
    check = FakeCheck(fitting, known={min(fitting)}, cost=MAX_TRIES // num_tests + spare)
    [result] = draw(check_order(logits, order, fitting), check, range(1), temperature=0.0)
    assert result.is_limited and result.tokens[0] in fitting
    is_last = num_tests + 1 if not spare else num_tests
    assert check.num_tests == is_last and result.tokens == (min(fitting),)


def check_order(logits: torch.Tensor, order: list[int], fitting: set[int]) -> torch.Tensor:
    """Put the tokens that do not fit first."""
    moved = logits.clone()
    moved[[token for token in order if token in fitting]] -= 100
    return moved


def test_where_nothing_that_is_known_may_be_drawn_another_token_is_drawn_untested():
    """As by a logit bias: the answer may be cut, and does not fail."""
    logits = line()
    order = logits.argsort(descending=True).tolist()
    logits[order[-1]] = -np.inf
    check = FakeCheck({order[-2], order[-1]}, known={order[-1]}, cost=MAX_TRIES + 1)
    [result] = draw(logits, check, range(1), temperature=0.0)
    assert result.tokens[0] not in (order[0], order[0] ^ 1, order[-1]) and not result.failed


def test_no_draw_tries_more_than_so_many_tokens(grammars, vocabulary):
    """Over schemas of all keywords and calls amid text, at budgets near their shortest answers: work, not time."""
    most = MAX_TRIES + 4 * (budget_close.MAX_TRIES + 1)  # the last test, and of up to three tokens like it
    rng, highest, num_draws = random.Random(5), 0, 0
    for number, matcher, budget in _small_budgets(grammars, vocabulary):
        row = np.zeros(vocabulary.num_words, dtype=np.int32)
        for remaining in range(budget, 0, -1):
            check = matcher.fill_grammar_mask(row, remaining)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: vocabulary.size].astype(bool)
            logits = torch.where(torch.from_numpy(bits), torch.randn(len(bits), generator=_seeded(rng)), -torch.inf)
            token = int(logits.argmax())
            if check is not None:
                counted = Counted()
                with counted:
                    token = redrawn(logits, check, rng.randrange(1 << 30), token)
                assert counted.tokens <= most, (number, remaining)
                highest, num_draws = max(highest, counted.tokens), num_draws + 1
            assert matcher.accept(token)
            if matcher.is_done:
                break
        assert matcher.can_end
    assert num_draws > 30 and highest > MAX_TRIES / 4


def _small_budgets(grammars, vocabulary) -> Iterator[tuple[int, Matcher, int]]:
    """Yield matchers with budgets in which their answers just fit."""
    for number, schema in enumerate(SCHEMAS[::3]):
        compiled = grammars.schema(schema)
        for spare in (0, 4):
            yield number, compiled.matcher(), (compiled.matcher().num_shortest or 0) + spare


def _seeded(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(1 << 30))


def redrawn(logits: torch.Tensor, check, seed: int, token: int) -> int:
    """Draw as the sampler does after a first draw."""
    params = np.zeros(1, dtype=_ROW)
    params["temperature"], params["top_p"], params["seed"] = 1.0, 1.0, seed
    tokens = [token]
    LimitedLines(logits[None], {0: check}, params, np.zeros(1, dtype=np.int64)).redraw(tokens)
    return tokens[0]


class Counted(pytest.MonkeyPatch):
    """Counts the tokens that the grammar library tries."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def __enter__(self) -> Counted:
        accept, advance = LlguidanceBackend.accept, LlguidanceBackend.advance

        def counted_accept(state: LlguidanceBackend, token: int) -> bool:
            self.tokens += 1
            return accept(state, token)

        def counted_advance(state: LlguidanceBackend, tokens: Sequence[int]) -> int:
            count = advance(state, tokens)
            self.tokens += min(count + 1, len(tokens))
            return count

        self.setattr(LlguidanceBackend, "accept", counted_accept)
        self.setattr(LlguidanceBackend, "advance", counted_advance)
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()
