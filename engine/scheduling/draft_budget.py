"""Draft budget: how many drafts each row of a step gets, and whether drafts outweigh overlap scheduling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from ..kv_cache.prefix_cache import PrefixCache
from ..sequence.sequence import Sequence
from ..speculation.proposer import Proposer
from .step_plan import StepInFlight, StepPlan, lease_of


class DraftBudget:
    """Gives drafts to the rows of a step, and learns from the steps what they cost.

    Args:
        proposer: proposes them.
        cache: lends their pages.
        most: drafts in one step.
    """

    def __init__(self, proposer: Proposer, cache: PrefixCache, most: int) -> None:
        self._proposer = proposer
        self._cache = cache
        self._most = most

    def add(self, plan: StepPlan, drawing: Seq[Sequence]) -> float:
        """Give drafts to the rows that draw, the likeliest first. No sequence is preempted for them.

        Returns:
            The tokens that they are expected to gain, 0 without any.
        """
        left, num_rows = min(plan.budget, self._most), len(drawing)
        found = []
        for sequence in drawing:
            if not self._proposer.in_backoff(sequence):
                limit = self._limit(sequence, left)
                if limit > 0 and (proposal := self._proposer.propose(sequence, limit, num_rows)):
                    found.append((sequence, proposal))
        if not found:
            return 0.0
        choice = self._proposer.choose([proposal for _, proposal in found], num_rows, left)
        for (sequence, proposal), count in zip(found, choice.counts, strict=True):
            if drafts := self._proposer.use(sequence, proposal, self._limit(sequence, count)):
                if self._cache.grow(lease_of(sequence), sequence.num_tokens + len(drafts)):
                    plan.add_drafts(sequence, drafts)
        return choice.gain

    def count_accepted(self, sequence: Sequence, num_drafts: int, num_drawn: int) -> None:
        self._proposer.count_accepted(sequence, num_drafts, num_drawn)

    def learn(
        self,
        step: StepInFlight,
        seconds: float,
        num_drawn: int,
        ahead: Iterable[StepInFlight],
        by_row: Mapping[int, Sequence],
    ) -> None:
        """Learn from a committed step what it cost, and what drafts would gain in the steps launched ahead of it.

        Args:
            seconds: that it took.
            num_drawn: tokens that it drew.
            ahead: steps in flight, whose tokens are known now.
            by_row: the running sequences.
        """
        batch = step.batch
        if batch.num_tokens == batch.num_positions:
            self._proposer.observe_step(len(batch.rows), batch.num_tokens, seconds, num_drawn, step.expected_gain)
        for each in ahead:
            for row in each.rows.values():
                sequence = by_row[row.row]
                if row.draws and not self._proposer.in_backoff(sequence):
                    limit = self._limit(sequence, self._most // max(1, each.num_drawing))
                    each.draft_gain += self._proposer.expected_gain(sequence, limit, each.num_drawing)

    def outweigh_overlap(self, step: StepInFlight) -> bool:
        """Return whether drafts after a step are likely to gain more than planning before its tokens are known."""
        return self._proposer.outweighs_overlap(step.draft_gain, step.num_drawing)

    def forget(self, sequence: Sequence) -> None:
        self._proposer.forget(sequence.id)

    def _limit(self, sequence: Sequence, part: int) -> int:
        return min(part, sequence.most_drafts)
