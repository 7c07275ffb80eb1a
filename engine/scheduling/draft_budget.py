"""The drafts of a whole step: how many each row gets, and what they would have been worth where a step has none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from ..kv_cache.prefix_cache import PrefixCache
from ..sequence.sequence import Sequence
from ..speculation.proposer import Proposer
from .step_plan import StepInFlight, StepPlan, lease_of


class DraftBudget:
    """Gives drafts to the rows of a step, and learns from the steps what that costs.

    Args:
        drafter: proposes them.
        cache: lends the pages that they need.
        most: in one step.
    """

    def __init__(self, proposer: Proposer, cache: PrefixCache, most: int) -> None:
        self._proposer = proposer
        self._cache = cache
        self._most = most

    def add(self, plan: StepPlan, drawing: Seq[Sequence]) -> None:
        """Give the rows that draw drafts, in equal parts of the budget left; nobody is preempted for their pages."""
        left = min(plan.budget, self._most)
        for behind, sequence in enumerate(drawing):
            if self._proposer.rests(sequence):
                continue
            limit = self._limit(sequence, left // (len(drawing) - behind))
            drafts = self._proposer.propose(sequence, limit, len(drawing))
            if len(drafts) and self._cache.grow(lease_of(sequence), sequence.num_tokens + len(drafts)):
                plan.add_drafts(sequence, drafts)
                left -= len(drafts)

    def settle(self, sequence: Sequence, num_drafts: int, num_drawn: int) -> None:
        """Take note of how many tokens a step drew for a sequence, some drafts of which it computed."""
        self._proposer.settle(sequence, num_drafts, num_drawn)

    def learn(
        self, step: StepInFlight, seconds: float, ahead: Iterable[StepInFlight], by_row: Mapping[int, Sequence]
    ) -> None:
        """A step was committed: note how long it took, and what drafts would be worth in those launched ahead of it.

        Args:
            seconds: that it took.
            ahead: steps under way, whose tokens are known now.
            by_row: the running sequences.
        """
        if step.batch.num_tokens == step.batch.num_positions:
            self._proposer.observe(step.batch.num_tokens, seconds)
        for each in ahead:
            for row in each.rows.values():
                sequence = by_row[row.row]
                if row.draws and not self._proposer.rests(sequence):
                    limit = self._limit(sequence, self._most // max(1, each.num_drawing))
                    each.draft_worth += self._proposer.worth(sequence, limit, each.num_drawing)

    def are_worth_waiting(self, step: StepInFlight) -> bool:
        """Whether drafts after a step are likely to gain more than planning before its tokens are known."""
        return self._proposer.is_worth_waiting(step.draft_worth, step.num_drawing)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._proposer.forget(sequence.id)

    def _limit(self, sequence: Sequence, part: int) -> int:
        return min(part, sequence.remaining - 1)
