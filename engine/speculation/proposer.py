"""Draft proposer: model-free speculative decoding from four sources, and how many drafts are worth computing.

Each source has its own acceptance rate for each sequence:

    grammar   text that the grammar forces, and its shortest end once the token budget forces that
    tree      tokens that followed in the radix tree, in the same namespace
    ngram     prompt lookup: tokens that followed an earlier match in the sequence itself
    answer    output lookup (suffix decoding): tokens that followed a match in another recent output of the namespace

Proposals are compared with the tokens drawn whether they were computed or not, so a wrong source costs only its lookup,
and is used again as soon as it is right. With acceptance rate p, the i-th draft is accepted with probability p^i, and
computed if that exceeds its cost. A new sequence starts with the recent rates of all sequences, capped at the priors.

A lookup costs about 20 us a row of a step of 10 ms. A sequence whose proposals are worth nothing for long backs off and
looks up only once in several tokens. Grammars are asked in every step: forced text is short.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum

from ..config import SpeculativeConfig
from ..engine_stats import EngineStats
from ..kv_cache.prefix_cache import PrefixCache
from ..sequence.sequence import Sequence
from ..step_cost import TokenCost
from .output_lookup import OutputIndex, OutputLookup
from .prompt_lookup import NgramIndex

_MARGIN = 1.25  # by which a draft's probability must exceed its cost, which is an estimate
_LOWEST_COST = 0.01  # no draft is free
_LONG_MATCH = 8  # tokens
_PRIOR_TRIALS = 2.0
_MOST_TRIALS = 20.0
_MOST_GLOBAL_TRIALS = 200.0
_HIGHEST_RATE = 0.99
_OVERLAP_GAIN = 0.1  # of a step: the time that overlap scheduling saves
_PATIENCE = 4  # useless lookups after which the interval doubles
_LONGEST_BACKOFF = 8  # tokens


class DraftSource(StrEnum):
    """Source of drafts; the names of the per-source counts in metrics."""

    GRAMMAR = "grammar"
    TREE = "tree"
    NGRAM = "ngram"
    ANSWER = "answer"


@dataclass(slots=True)
class _Rate:
    """Acceptance rate of a source: the probability that a draft is accepted if those before it are.

    Attributes:
        most: trials that count, the last ones (exponential decay).
        overall: the rate of all sequences, which is updated too.
    """

    hits: float
    trials: float = _PRIOR_TRIALS
    most: float = _MOST_TRIALS
    overall: _Rate | None = None

    @property
    def value(self) -> float:
        return min(self.hits / self.trials, _HIGHEST_RATE)

    def observe(self, hits: int, trials: int) -> None:
        self.hits, self.trials = self.hits + hits, self.trials + trials
        if self.trials > self.most:
            self.hits, self.trials = self.hits * self.most / self.trials, self.most
        if self.overall:
            self.overall.observe(hits, trials)


_PRIORS = {  # lookups have one rate for long and one for short matches
    "grammar": 0.9,
    "tree": 0.7,
    "long_match": 0.7,
    "short_match": 0.4,
    "long_answer": 0.7,
    "short_answer": 0.4,
}
_Rates = dict[str, _Rate]


def _global_rates() -> _Rates:
    """Return the acceptance rates of all sequences, at their priors."""
    return {name: _Rate(prior * _MOST_TRIALS, _MOST_TRIALS, _MOST_GLOBAL_TRIALS) for name, prior in _PRIORS.items()}


def _initial_rates(overall: _Rates) -> _Rates:
    """Return initial acceptance rates for a sequence: global rates capped at the priors."""
    values = {name: min(overall[name].value, prior) for name, prior in _PRIORS.items()}
    return {name: _Rate(value * _PRIOR_TRIALS, overall=overall[name]) for name, value in values.items()}


@dataclass(slots=True)
class _Proposal:
    """At least one token that a source expects next; ``position`` is that of the first."""

    source: DraftSource
    rate: _Rate
    tokens: Seq[int]
    position: int


@dataclass(slots=True)
class _Speculation:
    """State of one sequence.

    Attributes:
        proposals: the last ones, not yet compared with the tokens drawn.
        due: number of tokens of the sequence at the next lookup.
        num_useless: last lookups in a row that were worth nothing.
        used: source of the drafts in flight.
    """

    index: NgramIndex
    outputs: OutputIndex
    rates: _Rates
    proposals: list[_Proposal] = field(default_factory=list)
    due: int = 0
    num_useless: int = 0
    used: DraftSource | None = None

    def compare(self, tokens: array[int], *, every: bool) -> None:
        """Update acceptance rates by the tokens drawn since the proposals: of every source, or of the grammar alone."""
        proposals, self.proposals = self.proposals, []
        for proposal in proposals:
            if every or proposal.source is DraftSource.GRAMMAR:
                drawn = tokens[proposal.position : proposal.position + len(proposal.tokens)]
                hits = _num_common(proposal.tokens, drawn)
                proposal.rate.observe(hits, min(hits + 1, len(drawn)))
            else:
                self.proposals.append(proposal)

    def back_off(self, num_tokens: int, useful: bool) -> None:
        """Set the next lookup: after one token, or after more if the last ones were useless."""
        self.num_useless = 0 if useful else self.num_useless + 1
        self.due = num_tokens + min(_LONGEST_BACKOFF, 1 << self.num_useless // _PATIENCE)


class Proposer:
    """Proposes drafts for all sequences. Reads sequences and cache; keeps its own state of each until ``forget``.

    Args:
        config: not with method off.
        cache: whose tree is a source.
        stats: counters to write to.
    """

    def __init__(self, config: SpeculativeConfig, cache: PrefixCache, stats: EngineStats) -> None:
        self._method = config.method
        self._most = config.num_speculative_tokens
        self._cache = cache
        self._stats = stats
        self._token_cost = TokenCost()
        self._outputs = OutputLookup()
        self._rates = _global_rates()
        self._sequences: dict[int, _Speculation] = {}

    def in_backoff(self, sequence: Sequence) -> bool:
        """Return whether a sequence skips drafting in this step."""
        state = self._sequences.get(sequence.id)
        return state is not None and len(sequence.tokens) < state.due and not sequence.matcher

    def propose(self, sequence: Sequence, limit: int, num_rows: int) -> Seq[int]:
        """Return drafts for a running sequence that draws: text that its grammar admits, without stop tokens.

        Args:
            sequence: all its tokens are known to the step.
            limit: most drafts.
            num_rows: rows that draw in this step.
        """
        for _, count, proposal in self._ranked(sequence, limit, num_rows):
            if drafts := _admitted(sequence, proposal.tokens[:count]):
                self._sequences[sequence.id].used = proposal.source
                return drafts
        return ()

    def expected_gain(self, sequence: Sequence, limit: int, num_rows: int) -> float:
        """Return the tokens that drafts would gain in a step that is in flight without any; see ``propose``."""
        return max((gain for gain, _, _ in self._ranked(sequence, limit, num_rows)), default=0.0)

    def outweighs_overlap(self, gain: float, num_rows: int) -> bool:
        """Return whether drafts of such a gain make up for a step that is not planned ahead."""
        return gain > _OVERLAP_GAIN * num_rows

    def count_accepted(self, sequence: Sequence, num_drafts: int, num_drawn: int) -> None:
        """Count at least one draft computed for a sequence, and those accepted among its tokens drawn."""
        if used := self._sequences[sequence.id].used:
            self._stats.count_drafts(used, num_drafts, min(num_drafts, max(0, num_drawn - 1)))

    def forget(self, sequence_id: int) -> None:
        if state := self._sequences.pop(sequence_id, None):
            state.outputs.end()

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Learn the cost of a draft from a step in which every token is at a sampling position."""
        self._token_cost.observe(num_tokens, seconds)

    def _ranked(self, sequence: Sequence, limit: int, num_rows: int) -> list[tuple[float, int, _Proposal]]:
        """Return the proposals worth computing, best first: expected gain in tokens, number of drafts, proposal."""
        state = self._sequences.get(sequence.id) or self._begin(sequence)
        num_tokens = len(sequence.tokens)
        is_due = num_tokens >= state.due
        state.compare(sequence.tokens, every=is_due)
        proposals = self._proposals(sequence, state)
        state.proposals += proposals
        ranked = []
        if proposals:
            cost = min(1.0, max(_LOWEST_COST, _MARGIN * self._token_cost.threshold(num_rows)))
            gains = ((*_gain(proposal, min(limit, self._most), cost), proposal) for proposal in proposals)
            ranked = sorted((each for each in gains if each[1]), key=lambda each: -each[0])
        if is_due:
            state.back_off(num_tokens, any(each.source is not DraftSource.GRAMMAR for _, _, each in ranked))
        return ranked

    def _begin(self, sequence: Sequence) -> _Speculation:
        tokens = sequence.tokens
        outputs = OutputIndex(self._outputs, sequence.path.namespace, tokens, sequence.num_prompt)
        state = _Speculation(NgramIndex(tokens), outputs, _initial_rates(self._rates))
        self._sequences[sequence.id] = state
        return state

    def _proposals(self, sequence: Sequence, state: _Speculation) -> list[_Proposal]:
        """Ask the grammar and, if a lookup is due, the other sources."""
        rates, end, is_auto = state.rates, len(sequence.tokens), self._method == "auto"
        proposals = []
        if sequence.matcher and is_auto and (forced := sequence.matcher.draft(self._most)):
            proposals.append(_Proposal(DraftSource.GRAMMAR, rates["grammar"], forced, end))
        if end < state.due:
            return proposals
        length, tokens = state.index.lookup(self._most)
        if length:
            rate = rates["long_match" if length >= _LONG_MATCH else "short_match"]
            proposals.append(_Proposal(DraftSource.NGRAM, rate, tokens, end))
        if sequence.lease and is_auto and (after := self._cache.following(sequence.lease, sequence.tokens, self._most)):
            proposals.append(_Proposal(DraftSource.TREE, rates["tree"], after, end))
        if self._cache.sharing and is_auto:
            length, tokens = state.outputs.lookup(self._most)
            if length:
                rate = rates["long_answer" if length >= _LONG_MATCH else "short_answer"]
                proposals.append(_Proposal(DraftSource.ANSWER, rate, tokens, end))
        return proposals


def _gain(proposal: _Proposal, limit: int, cost: float) -> tuple[float, int]:
    """Return the expected gain of a proposal in tokens, and how many drafts of it pay: rate^i > cost."""
    rate = proposal.rate.value
    if rate <= cost:
        return 0.0, 0
    count = min(len(proposal.tokens), limit, int(math.log(cost) / math.log(rate)))
    return rate * (1 - rate**count) / (1 - rate) - count * cost, max(count, 0)


def _admitted(sequence: Sequence, tokens: Seq[int]) -> Seq[int]:
    """Return the leading tokens before one that ends the sequence or that its grammar does not admit."""
    end = len(tokens)
    if not sequence.stop_ids.isdisjoint(tokens):
        end = next(at for at, token in enumerate(tokens) if token in sequence.stop_ids)
    if sequence.matcher:
        end = sequence.matcher.admits(tokens[:end])
    return tokens[:end]


def _num_common(left: Seq[int], right: Seq[int]) -> int:
    """Return the number of equal leading tokens."""
    count = 0
    for mine, other in zip(left, right, strict=False):
        if mine != other:
            break
        count += 1
    return count
