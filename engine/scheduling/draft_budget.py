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

    def add(self, plan: StepPlan, drawing: Seq[Sequence]) -> None:
        """Give drafts to the rows that draw, in equal parts of the budget left. No sequence is preempted for them."""
        left = min(plan.budget, self._most)
        if plan.allowance is not None:
            left = plan.allowance.num_drafts(left)
        for behind, sequence in enumerate(drawing):
            if self._proposer.in_backoff(sequence):
                continue
            limit = self._limit(sequence, left // (len(drawing) - behind))
            drafts = self._proposer.propose(sequence, limit, len(drawing))
            if len(drafts) and self._cache.grow(lease_of(sequence), sequence.num_tokens + len(drafts)):
                plan.add_drafts(sequence, drafts)
                left -= len(drafts)

    def count_accepted(self, sequence: Sequence, num_drafts: int, num_drawn: int) -> None:
        self._proposer.count_accepted(sequence, num_drafts, num_drawn)

    def learn(
        self, step: StepInFlight, seconds: float, ahead: Iterable[StepInFlight], by_row: Mapping[int, Sequence]
    ) -> None:
        """Learn from a committed step what it cost, and what drafts would gain in the steps launched ahead of it.

        Args:
            seconds: that it took.
            ahead: steps in flight, whose tokens are known now.
            by_row: the running sequences.
        """
        if step.batch.num_tokens == step.batch.num_positions:
            self._proposer.observe_step(step.batch.num_tokens, seconds)
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
