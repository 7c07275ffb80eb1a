"""Scheduler: plans each step (the number of tokens that each sequence computes) and applies the step's result.

One rule applies to all sequences: a sequence has the KV of ``num_computed`` tokens in the pool and needs the KV of all
its ``num_tokens`` tokens. A step computes the missing tokens, as far as the token budget allows. A decoding sequence
lacks one token. A new sequence lacks its prompt without the prefix hit (chunked prefill). A preempted sequence lacks
the tokens whose KV was evicted. The budget is distributed in this order: single tokens; then prompts, within the rest
of the target inter-token latency (``ChunkBudget``), with the prompts of batch sequences last; then draft tokens.

Overlap scheduling: a step may be planned while the step before it is in flight. If a row of the step in flight samples
a token, the row's input in the new step is a reference to that token, whose value is not known yet. If the sequence
turns out to have ended with that token, the row's result in the new step is ignored. The sequence's pages are released,
and their next owner writes them only in a later step. Draft tokens, and the choice of sequences to preempt, depend on
the values of the tokens, so they are not planned ahead.

Preemption releases a sequence's pages to the tree and puts the sequence at the head of its priority class in the queue.
The sequence to preempt is the one admitted last in the last priority class. Batch sequences are also preempted to admit
a sequence of another class.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...radix.namespace import ENDLESS
from ..batch import Batch, Row, RowResult, StepResult
from ..engine_stats import EngineStats
from ..errors import CapacityError, EngineError
from ..kv_cache.prefix_cache import Lease, PrefixCache
from ..messages import Done, Message, TokenOut, failure_of
from ..sequence.guarded_matcher import GuardedMatcher
from ..sequence.mask_jobs import MaskJob, mask_jobs
from ..sequence.sequence import Sequence, Status
from ..sequence.stop_check import StopCheck, check_stop, failure
from ..types import FinishReason, Priority
from .admission import (
    AdapterSlots,
    RowTable,
    SlotRequests,
    awaits_pages,
    computed_twice,
    lacks_more,
    lacks_pages,
    num_reusable,
    pages_missing,
    preemption_victims,
    prefetch,
    read_ahead,
    try_acquire,
)
from .chunk_budget import ChunkBudget, usual_chunk
from .draft_budget import DraftBudget
from .sequence_meter import SequenceMeter
from .session_pins import SessionPins
from .slow_masks import SlowMasks
from .step_plan import StepPlan, lease_of
from .waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from ...grammar.match.reasoning_matcher import AnswerMatcher


class Scheduler:
    """Plans steps and applies their results. Only the scheduler writes to sequences and to the queue.

    Args:
        cache: prefix cache, with the pages of the pool and the prefix tree.
        max_num_seqs: number of rows, the limit on running sequences.
        max_num_batched_tokens: limit on the tokens in one step.
        stats: counters of the engine, which the scheduler updates.
        slots: device slots of adapters; None without adapters.
        drafts: gives draft tokens to rows; None without speculative decoding.
        target_itl: target inter-token latency in seconds by priority class; a class without an entry has no target.
        target_ttft: target time to first token in seconds by priority class; a class without an entry has no deadlines.
        clock: returns monotonic time in seconds.

    Attributes:
        session_pins: soft pins of sessions and prompts.
        slow_masks: fills the token masks for which steps do not wait.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        stats: EngineStats,
        slots: AdapterSlots | None = None,
        drafts: DraftBudget | None = None,
        target_itl: Mapping[Priority, float] = MappingProxyType({}),
        target_ttft: Mapping[Priority, float] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._stats = stats
        self._slots = slots
        self._drafts = drafts
        self._chunks = ChunkBudget(target_itl, max_num_batched_tokens)
        self._clock = clock
        self._meter = SequenceMeter(stats, cache.page_size, clock)
        self._committed = 0.0  # Time at which the last step was committed.
        self._in_flight: deque[StepPlan] = deque()  # At most two steps. The second one was planned ahead.
        self.session_pins, self.slow_masks = SessionPins(cache, clock), SlowMasks()
        self._queue = WaitingQueue(
            partial(num_reusable, cache) if cache.sharing else None, clock, target_ttft, self._chunks.least_seconds
        )
        self._running: list[Sequence] = []  # Running sequences in the order of their admission.
        self._alive: dict[int, Sequence] = {}
        self._rows = RowTable(max_num_seqs)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def max_tokens(self) -> int:
        """Current limit on the tokens of a step. For some time after ``drop_steps`` it is lower than the option."""
        return self._chunks.limit.tokens

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[int, ...]:
        return tuple(number for number, sequence in self._alive.items() if sequence.row < 0)

    def find(self, number: int) -> Sequence | None:
        """Return the waiting or running sequence with this id; None if there is none."""
        return self._alive.get(number)

    def capacity(self) -> dict[str, float]:
        """Return gauges of the quantities on which the waiting time of a new sequence depends.

        ``rows_usable`` is the number of rows for which there are pages. The rates of prefill are upper bounds. A prompt
        of at most ``prefill_short_tokens`` tokens overtakes longer ones, because it fits into the half of a step that
        longer prompts leave free.
        """
        is_short = any(lacks_pages(self._cache, each, self._running) for each in self._queue.head(1))
        return {
            "row_limit": self._rows.size,
            "rows_usable": len(self._running) if is_short else self._rows.size,
            "prefill_short_tokens": usual_chunk(self._chunks.limit.tokens) // 2,
            **self._chunks.prefill_stats(self._running),
        }

    def add(self, sequence: Sequence, matcher: AnswerMatcher | None = None) -> None:
        """Queue a sequence, with the matcher of its grammar if it has one.

        Raises ValueError if the sequence's id is in use.

        The matcher must be in the state before the first output token. If another engine has already generated tokens
        of the sequence, the matcher is first advanced by these tokens, on another thread.
        """
        if sequence.id in self._alive:
            raise ValueError(f"sequence {sequence.id} is alive already")
        self._alive[sequence.id] = sequence
        if matcher is not None:
            sequence.matcher = GuardedMatcher(matcher)
        if sequence.num_generated:
            self.slow_masks.replay(sequence)
        else:
            self.slow_masks.begin(sequence)
        self._queue.push(sequence)
        self._stats.accepted += 1

    def abort(self, ids: Iterable[int]) -> list[Message]:
        """Abort waiting or running sequences. Ids that are not alive are ignored. Returns messages to the client."""
        return [*self._finish_all(ids, FinishReason.ABORT)]

    def fail(self, ids: Iterable[int], error: EngineError) -> list[Message]:
        """End waiting or running sequences with an error.

        Ids that are not alive are ignored. Returns messages to the client.
        """
        return [failure_of(done.id, error) for done in self._finish_all(ids, FinishReason.ERROR)]

    def schedule(self) -> Batch:
        """Plan a step. The batch is empty if nothing can be computed before an adapter or a mask is ready."""
        assert not self._in_flight
        self.session_pins.expire()
        plan = StepPlan(self._chunks.limit.tokens, self._clock())
        for sequence in [each for each in self._running if each.num_tokens > each.rope_switch]:
            # The sequence is too long for its rotary embedding. All of its KV is computed again with the embedding for
            # long texts.
            sequence.path, sequence.rope_switch = sequence.path.as_long(), ENDLESS
            self._preempt(sequence, plan)
        self._fill(plan)
        if self._drafts:
            self._drafts.add(plan, [self._alive[number] for number, row in plan.rows.items() if row.draws])
        return self._begin(plan)

    def schedule_ahead(self) -> Batch:
        """Plan the step after the one in flight.

        The batch is empty if the tokens of the step in flight must be known first.
        """
        [step] = self._in_flight
        plan = StepPlan(self._chunks.limit.tokens, self._clock(), step.rows)
        if self._can_plan_ahead(step, plan):
            self._fill(plan)
        return self._begin(plan)

    def forget(self, batch: Batch) -> bool:
        """Drop the only step in flight if all its sequences have left it and no sequence started in it.

        Returns whether the step was dropped.
        """
        [step] = self._in_flight
        assert step.batch is batch
        if is_void := not (step.rows or batch.starts):
            self._in_flight.clear()
        return is_void

    def drop_steps(self) -> list[Message]:
        """Drop the steps in flight, because the device had too little memory for them, and requeue all running
        sequences.

        The sequences resume after the tokens that earlier steps have computed. Later steps have at most half as many
        tokens. If the steps had a single token, the largest sequence in them fails instead, so that the others can
        continue.

        Returns:
            Messages to the client.
        """
        sizes = [step.batch.num_tokens for step in self._in_flight]
        rows = [(self._owner(step, row), row) for step in self._in_flight for row in step.batch.rows]
        computed = [sequence for sequence, _ in rows if sequence]
        for sequence, row in rows:
            # Filling the masks has advanced the matcher by the draft tokens.
            if sequence and sequence.matcher and row.num_drafts:
                sequence.matcher.rollback_to(sequence.num_generated)
        self._in_flight.clear()
        # Each sequence is put at the head of its class. In reversed order, the sequence that was admitted first ends up
        # first.
        for sequence in reversed(self._running.copy()):
            # A partly filled page may lack a copy that was not made, so only KV that is in the tree is trusted.
            lease = lease_of(sequence)
            sequence.num_computed = min(sequence.num_computed, lease.num_shared * self._cache.page_size)
            self._requeue(sequence)
        if self._chunks.limit.halve(max(sizes, default=0)) or not computed:
            return []
        largest = max(computed, key=lambda each: each.num_tokens)
        error = CapacityError(
            f"The device has no memory for a step of this request, which has {largest.num_tokens} tokens. Try again "
            "later, or shorten it."
        )
        return self.fail([largest.id], error)

    def mask_jobs(self, batch: Batch) -> list[MaskJob]:
        """Return the token masks that a batch needs.

        No other step is in flight, so all tokens before the batch are known.
        """
        [step] = self._in_flight
        if not any(sequence.matcher for sequence in self._running):
            return []
        return mask_jobs(batch, partial(self._owner, step))

    def commit(self, batch: Batch, result: StepResult) -> list[Message]:
        """Apply the result of a step: its tokens, pages for the tree, and ended sequences.

        Returns messages to the client.
        """
        step = self._in_flight.popleft()
        assert step.batch is batch
        self._stats.count_step(batch.num_tokens, len(batch.rows))
        self._chunks.limit.count_step()
        messages: list[Message] = []
        for row, row_result in zip(batch.rows, result.rows, strict=True):
            if sequence := self._owner(step, row):
                messages += self._commit_row(sequence, row, row_result)
        self._learn(step, sum(len(row.tokens) for row in result.rows))
        return messages

    def _learn(self, step: StepPlan, num_drawn: int) -> None:
        """Update the cost estimates with the time that a step took."""
        now = self._clock()
        seconds, self._committed = now - max(step.began, self._committed), now
        self._chunks.observe(step.batch, seconds - step.draft_seconds)
        if self._drafts:
            self._drafts.learn(step, seconds, num_drawn, self._in_flight, self._rows.owners)

    def _owner(self, step: StepPlan, row: Row) -> Sequence | None:
        """Return the sequence of a row; None if the sequence has left the row since the step was planned."""
        sequence = self._rows.owners.get(row.row)
        return sequence if sequence and step.rows.get(sequence.id) is row else None

    def _fill(self, plan: StepPlan) -> None:
        """Distribute the token budget of a step: first to running sequences, then to sequences that are admitted now.

        Before a running long prompt, waiting short sequences are admitted with half of the tokens that are left.
        """
        ordered = plan.in_order(self._running)
        plan.allowance = self._chunks.begin(ordered)
        for sequence, start, wanted in ordered:
            if wanted - start > max(1, min(plan.room, plan.share(start, wanted))):
                self._admit(plan, plan.room // 2, sequence.priority)
            if plan.share(start, wanted) and sequence.status is Status.RUNNING:
                self._extend(sequence, start, wanted, plan)
        self._admit(plan)
        if self._slots is not None:
            prefetch(self._slots, self._queue.head(self._rows.size))
        if self._cache.tiers is not None:
            read_ahead(self._cache, self._cache.tiers, self._queue.head(self._rows.size))

    def _begin(self, plan: StepPlan) -> Batch:
        """Put a planned step in flight, unless it is empty. Returns its batch."""
        if (batch := plan.finish()).rows:
            self._in_flight.append(plan)
        return batch

    def _can_plan_ahead(self, step: StepPlan, plan: StepPlan) -> bool:
        """Return whether the next step can be planned before the tokens of the step in flight are known.

        It cannot be planned ahead if the step in flight has draft tokens, because the number of accepted ones is not
        known. It is not planned ahead either if drafts are likely to save more time than overlap, or if a sequence
        might have to be preempted: to free pages, to admit another sequence, or because its rotary embedding changes.
        """
        switches = any(each.num_tokens >= each.rope_switch for each in self._running)
        if switches or any(row.num_drafts for row in step.batch.rows) or self._may_preempt_to_admit():
            return False
        if self._drafts and self._drafts.outweigh_overlap(step):
            return False
        return sum(pages_missing(each, self._cache.page_size) for each in self._running) <= self._cache.available()

    def _extend(self, sequence: Sequence, start: int, wanted: int, plan: StepPlan) -> None:
        """Give a running sequence tokens and their pages.

        If pages are lacking, preempt other sequences, or this one.
        """
        end = start + plan.share(start, wanted)
        while not self._cache.grow(lease_of(sequence), end):
            victim = max(reversed(self._running), key=lambda running: running.priority)
            self._preempt(victim, plan)
            if victim is sequence:
                return
        plan.give(sequence, start, end, draws=end == wanted)

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Preempt a running sequence: return it to the queue.

        Its computed pages stay in the tree until they are evicted.
        """
        plan.take_back(sequence)
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.status = Status.WAITING
        sequence.counts.num_preempted += 1
        self._queue.requeue(sequence)
        self._stats.preemptions += 1

    def _admit(self, plan: StepPlan, most: int = ENDLESS, latest: Priority = Priority.BATCH) -> None:
        """Admit waiting sequences while rows, pages and budget last.

        Batch sequences may be preempted for other classes.

        A waiting sequence is skipped in three cases:

        1. Another sequence computes its prefix, unless the prefix is short. It then finds the prefix in the cache
           later. At most as many sequences are skipped for this reason as there are rows, which limits the work of a
           step.
        2. Its adapter has no slot yet.
        3. It needs more tokens than are left of ``most``, which all sequences admitted by this call may compute
           together.

        ``latest`` is the last priority class to admit.
        """
        if not self._has_room(plan) and not self._may_preempt_to_admit():
            return
        for sequence in self._queue.promote():
            sequence.priority = Priority.REALTIME
        passed_over = 0
        slots = SlotRequests(self._slots, self._rows.size)
        for sequence in self._queue:
            if passed_over > self._rows.size or sequence.priority > latest or most <= 0:
                return
            if not self._has_room(plan) and not preemption_victims(self._cache, sequence, self._running, plan):
                return
            if sequence.awaits_mask:
                continue
            twice = computed_twice(self._cache, sequence, self._running, plan, len(self._queue))
            if twice > self._chunks.most_twice or lacks_more(self._cache, sequence, most):
                passed_over += 1
                continue
            if self._cache.tiers is not None and awaits_pages(self._cache, sequence):
                continue
            if (slot := slots.acquire(sequence.spec.adapter, sequence.spec.tenant)) is None:
                continue
            sequence.slot = slot
            lease = self._make_room(sequence, plan)
            if lease is None:
                self._release_slot(sequence)
                return
            self._start(sequence, lease, plan)
            end = lease.num_tokens + plan.share(lease.num_tokens, sequence.num_tokens)
            if self._cache.grow(lease, end):
                plan.give(sequence, lease.num_tokens, end, draws=end == sequence.num_tokens)
                most -= end - lease.num_tokens

    def _has_room(self, plan: StepPlan) -> bool:
        return bool(plan.room and self._rows.free)

    def _may_preempt_to_admit(self) -> bool:
        """Return whether a running sequence may be preempted for a waiting one.

        Called in every step, so it must be cheap.
        """
        return any(each.priority is Priority.BATCH for each in self._running) and self._queue.has_before(Priority.BATCH)

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> Lease | None:
        """Return a lease for the sequence to admit, preempting others if necessary; None if the sequence must wait."""
        lease = try_acquire(self._cache, sequence, self._running) if self._has_room(plan) else None
        victims = preemption_victims(self._cache, sequence, self._running, plan) if lease is None else []
        for victim in victims:
            self._preempt(victim, plan)
            if self._has_room(plan) and (lease := try_acquire(self._cache, sequence, self._running)):
                break
        return lease

    def _release_slot(self, sequence: Sequence) -> None:
        if sequence.slot >= 0 and self._slots is not None:
            self._slots.release(sequence.slot)
            sequence.slot = -1

    def _start(self, sequence: Sequence, lease: Lease, plan: StepPlan) -> None:
        self._queue.admit(sequence)
        self._running.append(sequence)
        sequence.status, sequence.lease = Status.RUNNING, lease
        sequence.row = self._rows.take(sequence)
        sequence.num_computed = lease.num_tokens
        counts = sequence.counts
        if counts.num_cached < 0:
            # The prefix hit may include tokens that another engine has generated.
            most = sequence.num_prompt
            counts.num_cached, counts.num_forked = min(lease.num_tokens, most), min(lease.num_forked, most)
            self._queue.charge_prompt(sequence)
            self._meter.admit(sequence)
        if self._cache.tiers is not None:
            self._cache.tiers.drop(sequence.id)
        plan.begin(sequence)

    def _commit_row(self, sequence: Sequence, row: Row, result: RowResult) -> list[Message]:
        """Apply the result of a row. Returns messages to the client."""
        if self._drafts and row.num_drafts:
            self._drafts.count_accepted(sequence, row.num_drafts, len(result.tokens))
        check = check_stop(sequence, row, result)
        self._append(sequence, row, result, check)
        messages: list[Message] = []
        if check.num_sent or result.prompt_logprobs or result.allowed:
            tokens, logprobs = result.tokens[: check.num_sent], result.logprobs[: check.num_sent]
            scored, is_limited = result.prompt_logprobs, result.is_limited
            allowed = result.allowed[: check.num_tokens]
            messages.append(TokenOut(sequence.id, tokens, logprobs, scored, is_limited, result.pooled, allowed))
        if check.failed:
            self._finish(sequence, FinishReason.ERROR)
            return [*messages, failure(sequence)]
        sequence.num_computed += len(row.tokens) - row.num_drafts + check.num_accepted
        if check.reason:
            is_limited = check.is_limited or result.is_limited
            return [*messages, self._finish(sequence, check.reason, check.stop_token, is_limited)]
        self._cache.commit(lease_of(sequence), sequence.tokens, sequence.num_computed)
        if check.num_accepted < row.num_drafts:
            self._cache.shrink(lease_of(sequence), sequence.num_computed)
        if row.draws:
            self.slow_masks.begin(sequence, self._in_flight)
        return messages

    def _append(self, sequence: Sequence, row: Row, result: RowResult, check: StopCheck) -> None:
        """Append the tokens of a row to its sequence, and update the counts."""
        if check.num_tokens:
            self._meter.draw(sequence)
        sequence.tokens.extend(result.tokens[: check.num_tokens])
        counts = sequence.counts
        counts.num_scored += len(result.prompt_logprobs)
        # Accepted draft tokens after the end of the sequence are not part of its answer.
        counts.num_drafted += min(check.num_accepted, row.num_drafts, check.num_tokens)
        counts.num_forced += min(result.num_forced, check.num_tokens)
        self._queue.charge_tokens(sequence, check.num_tokens)
        self._stats.generation_tokens += len(result.tokens)
        self._stats.forced_tokens += result.num_forced

    def _finish_all(self, ids: Iterable[int], reason: FinishReason) -> list[Done]:
        alive = [self._alive[number] for number in ids if number in self._alive]
        return [self._finish(sequence, reason) for sequence in alive]

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop_token: int | None = None, is_limited: bool = False
    ) -> Done:
        """End a waiting or running sequence. Returns the message to the client."""
        measured = self._meter.end(sequence)
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
            sequence.counts.num_pinned = self.session_pins.add(sequence)
        self._queue.remove(sequence)
        if self._cache.tiers is not None:
            self._cache.tiers.drop(sequence.id)
        sequence.status = Status.FINISHED
        del self._alive[sequence.id]
        if sequence.matcher:
            sequence.matcher.cancel()
        if self._drafts:
            self._drafts.forget(sequence)
        self._stats.count_finished(reason)
        return Done(sequence.id, reason, sequence.usage, stop_token, measured, is_limited)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence out of its row: release the row, the slot and the pages. Rows in flight are ignored.

        Computed pages stay in the tree.
        """
        for step in self._in_flight:
            step.rows.pop(sequence.id, None)
        if self._drafts:
            self._drafts.leave(sequence)
        self._cache.release(lease_of(sequence), sequence.tokens, sequence.num_computed)
        self._running.remove(sequence)
        self._rows.give_back(sequence.row)
        self._release_slot(sequence)
        sequence.lease, sequence.row, sequence.num_computed = None, -1, 0
