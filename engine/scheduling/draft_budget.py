"""Draft budget: decides how many draft tokens each row of a step gets, and when drafts gain more than overlap."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq

from ..batch import Masks
from ..config import EngineConfig
from ..engine_stats import EngineStats
from ..kv_cache.prefix_cache import PrefixCache
from ..sequence.mask_jobs import MaskJob
from ..sequence.sequence import Sequence
from ..speculation.model_drafter import DraftRunner, ModelDrafter
from ..speculation.proposer import Proposal, Proposer
from .step_plan import StepPlan, lease_of

_PROBE_EVERY = 128  # After this many steps without the draft model, the draft model is tried again on one row.
_PROBE_LENGTH = 4  # Number of draft tokens in such a trial, and while the draft model's time is not known.
_PAUSE = 64  # Number of steps without the draft model after the device had no memory for one of its steps.


class DraftBudget:
    """Gives draft tokens to the rows of a step, and estimates the cost of drafts from finished steps.

    Args:
        proposer: proposes draft tokens.
        cache: prefix cache that provides the pages for draft tokens.
        most: largest number of draft tokens in one step.
        drafter: runs a draft model; None without a draft model.
        clock: returns monotonic time in seconds.
    """

    def __init__(
        self,
        proposer: Proposer,
        cache: PrefixCache,
        most: int,
        drafter: ModelDrafter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proposer = proposer
        self._cache = cache
        self._most = most
        self._drafter = drafter
        self._clock = clock
        self._num_idle = 0  # Number of consecutive last steps in which the draft model did not run.
        self._num_paused = 0  # Number of next steps without the draft model.

    def add(self, plan: StepPlan, drawing: Seq[Sequence]) -> None:
        """Give draft tokens to the rows that sample, the likeliest drafts first.

        No sequence is preempted for drafts.
        """
        left, num_rows = min(plan.budget, self._most), len(drawing)
        if plan.allowance is not None:
            left = plan.allowance.num_drafts(left)
        found: dict[int, tuple[Sequence, Proposal]] = {}
        for sequence in drawing:
            if not self._proposer.in_backoff(sequence):
                limit = self._limit(sequence, left)
                if limit > 0 and (proposal := self._proposer.propose(sequence, limit, num_rows)):
                    found[sequence.id] = sequence, proposal
        plan.draft_seconds = self._ask_model(drawing, found, left)
        if not found:
            return
        choice = self._proposer.choose([proposal for _, proposal in found.values()], num_rows, left)
        for (sequence, proposal), count in zip(found.values(), choice.counts, strict=True):
            drafts = self._proposer.use(sequence, proposal, self._limit(sequence, count))
            if drafts and self._cache.grow(lease_of(sequence), sequence.num_tokens + len(drafts)):
                plan.add_drafts(sequence, drafts)
        plan.draft_gain = choice.gain - self._proposer.tokens_in(plan.draft_seconds, num_rows)

    def _ask_model(self, drawing: Seq[Sequence], found: dict[int, tuple[Sequence, Proposal]], left: int) -> float:
        """Run the draft model for the rows in which its drafts are expected to gain more than other drafts.

        The draft model does not run if its expected gain is less than its cost, unless a trial run is due.

        Args:
            found: proposals of other sources by sequence id. Drafts of the draft model replace them.
            left: largest number of drafts of all rows together.

        Returns:
            Seconds for which the draft model ran.
        """
        drafter, num_rows = self._drafter, len(drawing)
        if drafter is None or not num_rows:
            return 0.0
        if self._num_paused:
            return 0.0
        rates = {}
        seconds = drafter.seconds(num_rows) / num_rows
        for sequence in drawing:
            limit = self._limit(sequence, left)
            if limit > 0 and drafter.can_follow(sequence):
                rate = self._proposer.model_rate(sequence)
                gain = self._proposer.model_gain(rate, limit, num_rows, seconds)
                if sequence.id not in found or self._proposer.gain(found[sequence.id][1], limit, num_rows) < gain:
                    rates[sequence.id] = rate
        asked = [sequence for sequence in drawing if sequence.id in rates]
        if not asked:
            # Other drafts are expected to gain more, so no trial run is due and steps may be planned ahead again.
            self._num_idle %= _PROBE_EVERY
            return 0.0
        length = self._proposer.draft_length([*rates.values()], num_rows, drafter.seconds(len(asked)))
        if not drafter.seconds(1) or (not length and self._num_idle >= _PROBE_EVERY):
            length, asked = _PROBE_LENGTH, asked[:1]
        self._num_idle = 0 if length else self._num_idle + 1
        if not length:
            return 0.0
        began = self._clock()
        length = min(length, max(1, left // len(asked)))
        drafts = drafter.draft((sequence, self._limit(sequence, length)) for sequence in asked)
        if drafter.lacked_memory:
            # The next steps would hardly find more memory, and each failing one takes as long as a successful one.
            self._num_paused = _PAUSE
        for sequence in asked:
            own = drafts.get(sequence.id)
            if own is not None and (proposal := self._proposer.from_model(sequence, own)):
                found[sequence.id] = sequence, proposal
        return self._clock() - began

    def count_accepted(self, sequence: Sequence, num_drafts: int, num_drawn: int) -> None:
        self._proposer.count_accepted(sequence, num_drafts, num_drawn)

    def learn(
        self,
        step: StepPlan,
        seconds: float,
        num_drawn: int,
        ahead: Iterable[StepPlan],
        by_row: Mapping[int, Sequence],
    ) -> None:
        """Update the estimates with a committed step: the cost of drafts, and the gain that drafts would have had in
        later steps.

        Args:
            seconds: seconds that the step took.
            num_drawn: number of tokens that the step sampled.
            ahead: steps in flight that were launched ahead; their input tokens are known now.
            by_row: the running sequences by row.
        """
        batch = step.batch
        self._num_paused = max(0, self._num_paused - 1)
        if batch.num_tokens == batch.num_positions:
            self._proposer.observe_step(
                len(batch.rows), batch.num_tokens, seconds, num_drawn, step.draft_gain, step.draft_seconds
            )
        for each in ahead:
            drawing = [by_row[row.row] for row in each.rows.values() if row.draws]
            of_model = self._gains_of_model(drawing)
            for sequence in drawing:
                gain = of_model.get(sequence.id, 0.0)
                if not self._proposer.in_backoff(sequence):
                    limit = self._limit(sequence, self._most // max(1, each.num_drawing_now))
                    gain = max(gain, self._proposer.expected_gain(sequence, limit, each.num_drawing_now))
                each.missed_gain += gain

    def _gains_of_model(self, drawing: Seq[Sequence]) -> dict[int, float]:
        """Return, by sequence id, the tokens that the draft model's drafts would have gained in a step without drafts.

        A step that is planned ahead cannot have drafts of the draft model. If a trial run of the draft model is due,
        the gain is infinite, so that the next step is not planned ahead.
        """
        drafter, num_rows = self._drafter, len(drawing)
        if drafter is None or self._num_paused:
            return {}
        part = self._most // max(1, num_rows)
        asked = [each for each in drawing if self._limit(each, part) > 0 and drafter.can_follow(each)]
        if not asked:
            return {}
        if not drafter.seconds(1) or self._num_idle >= _PROBE_EVERY:
            return {each.id: math.inf for each in asked}
        rates = [self._proposer.model_rate(each) for each in asked]
        length = self._proposer.draft_length(rates, num_rows, drafter.seconds(len(asked)))
        if not length:
            self._num_idle += 1
            return {}
        seconds = drafter.seconds(num_rows) / num_rows
        return {
            each.id: self._proposer.model_gain(rate, min(length, self._limit(each, part)), num_rows, seconds)
            for each, rate in zip(asked, rates, strict=True)
        }

    def outweigh_overlap(self, step: StepPlan) -> bool:
        """Return whether drafts after a step are likely to gain more than planning the next step ahead."""
        return self._proposer.outweighs_overlap(step.missed_gain, step.num_drawing_now)

    def leave(self, sequence: Sequence) -> None:
        """Release the draft model's state for a sequence that leaves its row."""
        if self._drafter is not None:
            self._drafter.leave(sequence)

    def forget(self, sequence: Sequence) -> None:
        self._proposer.forget(sequence.id)

    def check(self) -> None:
        """Raise AssertionError or BrokenInvariant if the draft model's pages are inconsistent."""
        if self._drafter is not None:
            self._drafter.check()

    def _limit(self, sequence: Sequence, part: int) -> int:
        most, states = min(part, sequence.most_drafts), lease_of(sequence).most_drafts(sequence.num_tokens)
        return most if states is None else min(most, states)


def make_draft_budget(
    config: EngineConfig,
    cache: PrefixCache,
    stats: EngineStats,
    draft: DraftRunner | None,
    fill_masks: Callable[[Seq[MaskJob]], Callable[[], Masks]],
) -> DraftBudget | None:
    """Return the draft budget that the options configure; None without speculative decoding.

    Args:
        draft: the draft model; None without a draft model.
        fill_masks: starts to fill the token masks of a draft model's step, see ``ModelDrafter``.
    """
    if not config.max_drafts:
        return None
    drafter = None
    if draft is not None:
        sharing, num_rows = config.enable_prefix_caching, config.most_seqs
        drafter = ModelDrafter(draft, config.block_size, fill_masks, sharing=sharing, num_rows=num_rows)
    return DraftBudget(Proposer(config.speculative, cache, stats), cache, config.max_drafts, drafter)
