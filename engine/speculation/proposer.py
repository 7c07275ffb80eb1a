"""Draft proposer: model-free speculative decoding from four sources, each with measured acceptance rates.

Each source has its own acceptance rates for each sequence:

    grammar   text that the grammar forces, and its shortest end once the token budget forces that
    tree      tokens that followed in the radix tree, in the same namespace
    ngram     prompt lookup: tokens that followed an earlier match in the sequence itself
    answer    output lookup (suffix decoding): tokens that followed a match in another recent output of the namespace

All proposals are compared with the drawn tokens, even those that were not computed as drafts. So a source that is
mostly wrong costs only its lookups, and is used again as soon as it is right. The acceptance rate of a lookup depends
on the length of its match (``AcceptanceRates``). A new sequence starts with the recent rates of all sequences.
``DraftCost`` chooses among the proposals of all rows of a step.

A lookup takes about 20 us for each row, in a step of 10 ms. If the proposals for a sequence have not been used for a
long time, the sequence backs off: lookups are made only once in several tokens. If nearly all sequences have backed
off, new ones start in this state, and back off further. Text that a grammar forces is looked up in every step, because
it is short.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum

from ..engine_stats import EngineStats
from ..json_options import SpeculativeConfig
from ..kv_cache.prefix_cache import PrefixCache
from ..sequence.sequence import Sequence
from .acceptance import AcceptanceRate, AcceptanceRates, Runs, chances, observe
from .draft_cost import DraftChoice, DraftCost
from .output_lookup import OutputIndex, OutputLookup
from .prompt_lookup import NgramIndex

# The share of useful lookups starts as if so many had been useful, and is averaged over at most so many.
_LOOKUPS, _MOST_LOOKUPS = 20.0, 200.0
# Overlap scheduling saves this share of a step.
_OVERLAP_GAIN = 0.1
_PATIENCE = 4  # useless lookups after which the interval doubles
_LONGEST_BACKOFF = 8  # tokens
_RARELY = 0.05  # share of lookups that were useful, of all sequences, below which they are made yet more rarely
_RARE_BACKOFF = 32  # tokens from one lookup to the next, then


class DraftSource(StrEnum):
    """Source of drafts; the names of the per-source counts in metrics."""

    GRAMMAR = "grammar"
    TREE = "tree"
    NGRAM = "ngram"
    ANSWER = "answer"
    MODEL = "model"


_ALWAYS_ASKED = (DraftSource.GRAMMAR, DraftSource.MODEL)  # sources that are asked whatever the back-off from lookups


@dataclass(slots=True)
class Proposal:
    """At least one token that a source expects next; ``position`` is that of the first."""

    source: DraftSource
    runs: Runs
    tokens: Seq[int]
    position: int

    def observe(self, drawn: Seq[int]) -> None:
        """Update the acceptance rates by the tokens drawn at the proposal's positions, as many as are known."""
        hits = _num_common(self.tokens, drawn)
        observe(self.runs, hits, min(hits + 1, len(drawn)))


@dataclass(slots=True)
class _Speculation:
    """State of one sequence.

    Attributes:
        proposals: the last proposals, which have not been compared with drawn tokens yet.
        due: number of tokens of the sequence at the next lookup.
        num_useless: number of last lookups in a row whose proposals were not computed.
        used: source of the drafts in flight.
    """

    index: NgramIndex
    outputs: OutputIndex
    rates: AcceptanceRates
    proposals: list[Proposal] = field(default_factory=list)
    due: int = 0
    num_useless: int = 0
    used: DraftSource | None = None

    def compare(self, tokens: array[int], *, every: bool) -> None:
        """Update acceptance rates by the tokens drawn since the proposals, of those always asked or of all sources."""
        proposals, self.proposals = self.proposals, []
        for proposal in proposals:
            if every or proposal.source in _ALWAYS_ASKED:
                proposal.observe(tokens[proposal.position : proposal.position + len(proposal.tokens)])
            else:
                self.proposals.append(proposal)

    def back_off(self, num_tokens: int, longest: int) -> None:
        """Set the next lookup: after one token, or after more, at most ``longest``, if the last ones were useless."""
        self.due = num_tokens + min(longest, 1 << self.num_useless // _PATIENCE)


class Proposer:
    """Proposes drafts for all sequences. Reads sequences and cache; keeps its own state of each until ``forget``.

    Args:
        config: the configuration; its method is not off.
        cache: the prefix cache, whose tree is a source.
        stats: counters to write to.
    """

    def __init__(self, config: SpeculativeConfig, cache: PrefixCache, stats: EngineStats) -> None:
        self._method = config.method
        self._most = config.num_speculative_tokens
        self._cache = cache
        self._stats = stats.draft_stats
        self._cost = DraftCost()
        self._outputs = OutputLookup()
        self._rates = AcceptanceRates()
        self._useful = AcceptanceRate(_LOOKUPS, _LOOKUPS, _MOST_LOOKUPS)  # lookups of which drafts were computed
        self._sequences: dict[int, _Speculation] = {}

    def in_backoff(self, sequence: Sequence) -> bool:
        """Return whether a sequence skips drafting in this step."""
        state = self._sequences.get(sequence.id)
        return state is not None and len(sequence.tokens) < state.due and not sequence.matcher

    def propose(self, sequence: Sequence, limit: int, num_rows: int) -> Proposal | None:
        """Return the best proposal for a running sequence that draws, None if none is worth its cost.

        Args:
            sequence: a sequence all of whose tokens are known.
            limit: largest number of drafts.
            num_rows: rows that draw in this step.
        """
        best: Proposal | None = None
        best_gain = 0.0
        for proposal in self._ask(sequence):
            gain = self.gain(proposal, limit, num_rows)
            if gain > best_gain:
                best, best_gain = proposal, gain
        return best

    def gain(self, proposal: Proposal, limit: int, num_rows: int) -> float:
        """Return the tokens that a proposal is expected to gain, less the cost of its drafts; see ``propose``."""
        most = min(len(proposal.tokens), limit, self._most)
        return _gain(chances(proposal.runs, most), self._cost.threshold(num_rows))

    def model_gain(self, rate: float, limit: int, num_rows: int, seconds: float) -> float:
        """Return the number of tokens that drafts of a draft model gain in expectation, less the cost of their seconds.

        Args:
            rate: see ``model_rate``.
        """
        cost = self._cost.threshold(num_rows) + self._cost.tokens_in(seconds, num_rows)
        return _gain([rate] * min(limit, self._most), cost)

    def choose(self, proposals: Seq[Proposal], num_rows: int, limit: int) -> DraftChoice:
        """Return how many drafts of each proposal pay, at most ``limit`` together; see ``DraftCost.choose``."""
        rates = [chances(each.runs, min(len(each.tokens), self._most)) for each in proposals]
        return self._cost.choose(rates, num_rows, limit)

    def use(self, sequence: Sequence, proposal: Proposal, count: int) -> Seq[int]:
        """Return the drafts of a proposal that are computed: text that the grammar admits, without stop tokens."""
        drafts = _admitted(sequence, proposal.tokens[:count])
        if drafts:
            state = self._sequences[sequence.id]
            state.used = proposal.source
            if proposal.source not in _ALWAYS_ASKED:
                self._found_useful(sequence, state)
        return drafts

    def model_rate(self, sequence: Sequence) -> float:
        """Return the acceptance rate of a draft model's drafts for a sequence, the lower bound."""
        state = self._sequences.get(sequence.id) or self._begin(sequence)
        state.compare(sequence.tokens, every=False)
        return state.rates.model.lower_bound

    def draft_length(self, rates: Seq[float], num_rows: int, seconds: float) -> int:
        """Return how many drafts of a draft model pay; see ``DraftCost.draft_length``."""
        return self._cost.draft_length(rates, num_rows, seconds, self._most)

    def from_model(self, sequence: Sequence, drafts: Seq[int]) -> Proposal | None:
        """Return the proposal of a draft model, after ``model_rate``.

        Returns None if the draft model could draw no token, mostly because the grammar allows no token of its
        vocabulary. This counts as a wrong draft.
        """
        state = self._sequences[sequence.id]
        if not drafts:
            state.rates.model.observe(0, 1)
            return None
        proposal = Proposal(DraftSource.MODEL, state.rates.of_model(), drafts, sequence.num_tokens)
        state.proposals.append(proposal)
        return proposal

    def tokens_in(self, seconds: float, num_rows: int) -> float:
        """Return the tokens that steps without drafts draw in some seconds."""
        return self._cost.tokens_in(seconds, num_rows)

    def expected_gain(self, sequence: Sequence, limit: int, num_rows: int) -> float:
        """Return the tokens that drafts would gain in a step that is in flight without any; see ``propose``."""
        gains = [(self.gain(each, limit, num_rows), each.source) for each in self._ask(sequence)]
        if any(gain and source is not DraftSource.GRAMMAR for gain, source in gains):
            self._found_useful(sequence, self._sequences[sequence.id])
        return max((gain for gain, _ in gains), default=0.0)

    def outweighs_overlap(self, gain: float, num_rows: int) -> bool:
        """Return whether drafts of such a gain make up for a step that is not planned ahead."""
        return gain > _OVERLAP_GAIN * num_rows

    def count_accepted(self, sequence: Sequence, num_drafts: int, num_drawn: int) -> None:
        """Count at least one draft computed for a sequence, and those accepted among its tokens drawn."""
        if used := self._sequences[sequence.id].used:
            self._stats.count(used, num_drafts, min(num_drafts, max(0, num_drawn - 1)))

    def forget(self, sequence_id: int) -> None:
        if state := self._sequences.pop(sequence_id, None):
            state.outputs.end()

    def observe_step(
        self, num_rows: int, num_tokens: int, seconds: float, num_drawn: int, gain: float, drafting: float = 0.0
    ) -> None:
        """Learn from a step in which every token is at a sampling position; see ``DraftCost.observe``."""
        self._cost.observe(num_rows, num_tokens, seconds, num_drawn, gain, drafting)

    def _ask(self, sequence: Sequence) -> list[Proposal]:
        """Return the proposals for a sequence, and back off from the next lookup until this one has proved useful."""
        state = self._sequences.get(sequence.id) or self._begin(sequence)
        num_tokens = len(sequence.tokens)
        is_due = num_tokens >= state.due
        state.compare(sequence.tokens, every=is_due)
        proposals = self._proposals(sequence, state)
        state.proposals += proposals
        if is_due:
            state.num_useless += 1
            self._useful.observe(0, 1)
            state.back_off(num_tokens, _RARE_BACKOFF if self._useful.value < _RARELY else _LONGEST_BACKOFF)
        return proposals

    def _found_useful(self, sequence: Sequence, state: _Speculation) -> None:
        """Look up again after one token, as the last lookup was useful."""
        state.num_useless, state.due = 0, len(sequence.tokens) + 1
        self._useful.observe(1, 0)

    def _begin(self, sequence: Sequence) -> _Speculation:
        tokens = sequence.tokens
        outputs = OutputIndex(self._outputs, sequence.path.namespace, tokens, sequence.num_prompt)
        state = _Speculation(NgramIndex(tokens), outputs, AcceptanceRates(self._rates))
        if self._useful.value < _RARELY:
            state.num_useless = 3 * _PATIENCE
        self._sequences[sequence.id] = state
        return state

    def _proposals(self, sequence: Sequence, state: _Speculation) -> list[Proposal]:
        """Ask the grammar and, if a lookup is due, the other sources."""
        rates, end, is_auto = state.rates, len(sequence.tokens), self._method != "ngram"
        proposals = []
        if sequence.matcher and is_auto and (forced := sequence.matcher.draft(self._most)):
            proposals.append(Proposal(DraftSource.GRAMMAR, rates.of_grammar(), forced, end))
        if end < state.due:
            return proposals
        length, tokens = state.index.lookup(self._most)
        if length:
            proposals.append(Proposal(DraftSource.NGRAM, rates.of_match(length), tokens, end))
        if sequence.lease and is_auto and (after := self._cache.following(sequence.lease, sequence.tokens, self._most)):
            proposals.append(Proposal(DraftSource.TREE, rates.of_tree(), after, end))
        if self._cache.sharing and is_auto:
            length, tokens = state.outputs.lookup(self._most)
            if length:
                proposals.append(Proposal(DraftSource.ANSWER, rates.of_answer(length), tokens, end))
        return proposals


def _gain(rates: Seq[float], cost: float) -> float:
    """Return the expected gain in tokens of those drafts whose acceptance probability exceeds their cost.

    Args:
        rates: for each draft, the probability that it is accepted if the drafts before it are.
    """
    gain, chance = 0.0, 1.0
    for rate in rates:
        chance *= rate
        if chance <= cost:
            break
        gain += chance - cost
    return gain


def _admitted(sequence: Sequence, tokens: Seq[int]) -> Seq[int]:
    """Return the leading tokens before one that ends the sequence or that its grammar does not admit."""
    end = len(tokens)
    if not sequence.spec.stop_ids.isdisjoint(tokens):
        end = next(at for at, token in enumerate(tokens) if token in sequence.spec.stop_ids)
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
