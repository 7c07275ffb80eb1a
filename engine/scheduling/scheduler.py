"""Which sequences get how many tokens in the next step, and what follows from the result.

There is one rule: a sequence has ``num_computed`` tokens in the KV pool and wants all ``num_tokens`` there; a step
gives it ``min(want, budget)``. A sequence that has just drawn a token wants one (decode), one that was just admitted
wants its prompt less what the cache had (prefill, in chunks), a preempted one wants whatever was evicted meanwhile.
No branch below asks which of these it is looking at, but for the order: those that want a single token go first, so
that a long prompt delays running streams by no more than one chunk, cut so that it takes a quarter of a second
(``engine/chunk_size.py``). What budget and pages are left then goes to drafts.

A step may be planned while the one before is under way, on a device that computes while the host goes on. What that
one computes is known, and that each of its rows draws one token; so a row's next input is "the token drawn before",
whatever it is. Where a sequence turns out to have ended there, or is aborted, its part of the next step is computed
for nothing and never looked at: steps run one after the other, so pages that it gives back are written by their next
owner only when that is over. What must know the tokens waits for them: drafts, and the choice of whom to preempt.

Preemption is "finish without telling the client": the computed pages go to the tree, the sequence to the head of its
band of the queue, and it comes back as a prefix hit. The victim is the last admitted of the last band, so the first
admitted of the first band always makes progress and nobody preempts in circles. Batch sequences also give way when one
of another band is to be admitted and finds no row, page or budget.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from ..batch import Batch, Row, RowResult, StepResult
from ..chunk_size import ChunkLimit
from ..engine_stats import EngineStats
from ..errors import EngineError
from ..kv_cache.prefix_cache import Lease, PrefixCache
from ..messages import Done, Message, TokenOut, failure_of
from ..sequence.sequence import MaskJob, Sequence, Status
from ..sequence.stop_check import failure, take
from ..speculation.proposer import Proposer
from ..types import FinishReason, Priority
from .admission import (
    AdapterSlots,
    SlotRequests,
    giving_way,
    pages_missing,
    prefetch,
    prefix_in_progress,
    try_acquire,
)
from .draft_budget import DraftBudget
from .mask_jobs import SlowMasks, mask_jobs
from .session_pins import SessionPins
from .step_plan import StepInFlight, StepPlan, lease_of
from .waiting_queue import WaitingQueue


class Scheduler:
    """The only writer of sequences and the queue.

    Args:
        cache: pages and tree.
        max_num_seqs: rows, that is, most running sequences.
        max_num_batched_tokens: tokens in one step.
        stats: counters to write to.
        slots: of adapters; None if there are none, and no sequence has one.
        drafter: proposes drafts; None for none.
        max_drafts: drafts in one step.
        clock: seconds, monotonic.

    Attributes:
        retention: what stays in the cache for calls to come.
        slow_masks: those that steps do not wait for.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        stats: EngineStats,
        slots: AdapterSlots | None = None,
        proposer: Proposer | None = None,
        max_drafts: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._max_tokens = max_num_batched_tokens
        self._stats = stats
        self._slots = slots
        self._drafts = DraftBudget(proposer, cache, max_drafts) if proposer else None
        self._chunks = ChunkLimit()
        self._clock = clock
        self._committed = 0.0  # when the last step was
        self._under_way: deque[StepInFlight] = deque()  # at most two, the later one planned ahead
        self.session_pins = SessionPins(cache, clock)
        self.slow_masks = SlowMasks()
        self._queue = WaitingQueue(self._num_cached if cache.sharing else None, clock)
        self._running: list[Sequence] = []  # in order of admission
        self._alive: dict[int, Sequence] = {}
        self._by_row: dict[int, Sequence] = {}
        self._num_rows = max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Sequences with a row."""
        return len(self._running)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The running sequences, for audits."""
        return tuple(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. ValueError if its id is alive already."""
        if sequence.id in self._alive:
            raise ValueError(f"sequence {sequence.id} is alive already")
        self._alive[sequence.id] = sequence
        self.slow_masks.begin(sequence)
        self._queue.push(sequence)
        self._stats.accepted += 1

    def abort(self, ids: Iterable[int]) -> list[Message]:
        """End these sequences, whatever they are doing; ids that are not alive are ignored."""
        alive = [self._alive[i] for i in ids if i in self._alive]
        return [self._finish(sequence, FinishReason.ABORT) for sequence in alive]

    def fail(self, ids: Iterable[int], error: EngineError) -> list[Message]:
        """End these sequences with an error; ids that are not alive are ignored."""
        alive = [self._alive[i] for i in ids if i in self._alive]
        for sequence in alive:
            self._finish(sequence, FinishReason.ERROR)
        return [failure_of(sequence.id, error) for sequence in alive]

    def fail_all(self, error: EngineError) -> list[Message]:
        """End every sequence with an error."""
        return self.fail(tuple(self._alive), error)

    def schedule(self) -> Batch:
        """Plan a step. An empty batch means that nothing can be done now: who waits, waits for a slot to be loaded."""
        assert not self._under_way
        self.session_pins.expire()
        plan = StepPlan(self._max_tokens, self._clock())
        self._fill(plan)
        if self._drafts:
            self._drafts.add(plan, [self._alive[number] for number, row in plan.rows.items() if row.draws])
        return self._begin(plan)

    def schedule_ahead(self) -> Batch:
        """Plan the step after the one under way. An empty batch means that its tokens must be known first."""
        [step] = self._under_way
        plan = StepPlan(self._max_tokens, self._clock(), step.rows)
        if self._can_plan_ahead(step, plan):
            self._fill(plan)
        return self._begin(plan)

    def forget(self, batch: Batch) -> bool:
        """Forget the only step under way if nobody awaits its result: no sequence is left in it, and none began."""
        [step] = self._under_way
        assert step.batch is batch
        is_void = not (step.rows or batch.starts)
        if is_void:
            self._under_way.clear()
        return is_void

    def mask_jobs(self, batch: Batch) -> list[MaskJob]:
        """The masks that a batch needs; no other step is under way, so that all tokens before it are known."""
        [step] = self._under_way
        if not any(sequence.matcher for sequence in self._running):
            return []
        return mask_jobs(batch, partial(self._owner, step))

    def commit(self, batch: Batch, result: StepResult) -> list[Message]:
        """Take the result of a step over: tokens, pages for the tree, ends. Returns what the client is told."""
        step = self._under_way.popleft()
        assert step.batch is batch
        messages: list[Message] = []
        for row, outcome in zip(batch.rows, result.rows, strict=True):
            if sequence := self._owner(step, row):
                messages += self._commit_row(sequence, row, outcome)
        self._stats.steps += 1
        self._stats.computed_tokens += batch.num_tokens
        self._stats.observe("iteration_tokens_total", batch.num_tokens)
        self._learn(step)
        return messages

    def _learn(self, step: StepInFlight) -> None:
        """A step was committed: note how long it took."""
        now = self._clock()
        seconds, self._committed = now - max(step.began, self._committed), now
        self._chunks.observe(step.batch.num_tokens, step.batch.num_positions, seconds)
        if self._drafts:
            self._drafts.learn(step, seconds, self._under_way, self._by_row)

    def _owner(self, step: StepInFlight, row: Row) -> Sequence | None:
        """The sequence of a row, None if it has left the row since the step was planned."""
        sequence = self._by_row.get(row.row)
        return sequence if sequence and step.rows.get(sequence.id) is row else None

    def _fill(self, plan: StepPlan) -> None:
        """Give running sequences their tokens, then admit others."""
        turn = self._in_turn(plan)
        streams = sum(wanted - start == 1 for _, start, wanted in turn)
        plan.budget = self._chunks.cut(plan.budget, streams)
        for sequence, start, wanted in turn:
            if plan.budget and sequence.status is Status.RUNNING:
                self._extend(sequence, start, wanted, plan)
        self._admit(plan)
        if self._slots is not None:
            prefetch(self._slots, self._queue.head(self._num_rows))

    def _begin(self, plan: StepPlan) -> Batch:
        """The plan is made: unless it is empty, its step is under way from now on."""
        batch = plan.batch
        if batch.rows:
            self._under_way.append(StepInFlight(batch, plan.rows, plan.began))
        return batch

    def _can_plan_ahead(self, step: StepInFlight, plan: StepPlan) -> bool:
        """Whether what follows a step can be planned before its tokens are known.

        Not if it has drafts, of which nobody knows how many will stand; nor if the next one is likely to gain more by
        drafts than by being planned early; nor if somebody might have to be preempted, for pages or to make room.
        """
        if any(row.num_drafts for row in step.batch.rows) or self._can_make_room():
            return False
        if self._drafts and self._drafts.are_worth_waiting(step):
            return False
        missing = sum(pages_missing(sequence, self._cache.page_size) for sequence in self._running)
        return missing <= self._cache.available()

    def _in_turn(self, plan: StepPlan) -> list[tuple[Sequence, int, int]]:
        """Running sequences that go on, and what they want: those of one token, then the others, as admitted."""
        going = [(each, *plan.span(each)) for each in self._running if self._can_go_on(each, plan)]
        return sorted(going, key=lambda wish: wish[2] - wish[1] > 1)

    def _can_go_on(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Not if the token that the step under way draws is the last one, whatever it is, or if a mask comes first."""
        row = plan.before.get(sequence.id)
        if row is None or not row.draws:
            return not self.slow_masks.is_filling(sequence)
        left = sequence.remaining - 1
        return left > 0 and not (sequence.matcher and sequence.matcher.is_slow(left))

    def _extend(self, sequence: Sequence, start: int, wanted: int, plan: StepPlan) -> None:
        """Give a running sequence tokens and their pages, if need be at the cost of the last admitted."""
        end = min(wanted, start + plan.budget)
        while not self._cache.grow(lease_of(sequence), end):
            victim = max(reversed(self._running), key=lambda running: running.priority)
            self._preempt(victim, plan)
            if victim is sequence:
                return
        plan.give(sequence, start, end, draws=end == wanted)

    def _num_cached(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that are in the cache now."""
        return self._cache.match(sequence.path, sequence.tokens, sequence.reusable)

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Send a running sequence back to the head of its band; what it computed stays in the tree if it can."""
        plan.take_back(sequence)
        self._leave(sequence)
        sequence.status = Status.WAITING
        sequence.num_preempted += 1
        self._queue.requeue(sequence)
        self._stats.preemptions += 1

    def _admit(self, plan: StepPlan) -> None:
        """Admit from the queue while rows, pages and budget last; batch sequences give way to others.

        A sequence whose prefix is just being computed by another is passed over, so that it finds it; at most as
        many as there are rows, which bounds the work of a step with a long queue. One whose adapter has no slot yet
        is passed over too: nobody waits with it.
        """
        if not self._has_room(plan) and not self._can_make_room():
            return
        passed_over = 0
        slots = SlotRequests(self._slots, self._num_rows)
        for sequence in self._queue:
            if passed_over > self._num_rows:
                return
            if not self._has_room(plan) and not giving_way(self._cache, sequence, self._running):
                return
            if self.slow_masks.is_filling(sequence):
                continue
            if self._cache.sharing and prefix_in_progress(self._cache, sequence, self._running):
                passed_over += 1
                continue
            slot = slots.ask(sequence.adapter)
            if slot is None:
                continue
            sequence.slot = slot
            lease = self._make_room(sequence, plan)
            if lease is None:
                self._give_slot_back(sequence)
                return
            self._start(sequence, lease, plan)
            end = min(sequence.num_tokens, lease.num_tokens + plan.budget)
            if self._cache.grow(lease, end):
                plan.give(sequence, lease.num_tokens, end, draws=end == sequence.num_tokens)

    def _has_room(self, plan: StepPlan) -> bool:
        return bool(plan.budget and self._free_rows)

    def _can_make_room(self) -> bool:
        """Whether anybody who waits may have a running sequence give way. Cheap, since it is asked in every step."""
        batch = Priority.BATCH
        return any(other.priority is batch for other in self._running) and self._queue.has_before(batch)

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> Lease | None:
        """A lease for the sequence whose turn it is, if need be at the cost of running ones that give way to it."""
        lease = try_acquire(self._cache, sequence, self._running) if self._has_room(plan) else None
        late = giving_way(self._cache, sequence, self._running) if lease is None else []
        for victim in late:
            self._preempt(victim, plan)
            if self._has_room(plan) and (lease := try_acquire(self._cache, sequence, self._running)):
                break
        return lease

    def _give_slot_back(self, sequence: Sequence) -> None:
        if sequence.slot >= 0 and self._slots is not None:
            self._slots.release(sequence.slot)
            sequence.slot = -1

    def _start(self, sequence: Sequence, lease: Lease, plan: StepPlan) -> None:
        self._queue.admit(sequence)
        self._running.append(sequence)
        sequence.status, sequence.lease = Status.RUNNING, lease
        sequence.row = self._free_rows.pop()
        sequence.num_computed = lease.num_tokens
        self._by_row[sequence.row] = sequence
        if sequence.num_cached < 0:
            self._count_admission(sequence, lease)
        plan.begin(sequence)

    def _count_admission(self, sequence: Sequence, lease: Lease) -> None:
        sequence.num_cached, sequence.num_forked = lease.num_tokens, lease.num_forked
        self._queue.charge_prompt(sequence)
        self._stats.count_prompt(sequence.num_prompt, sequence.num_cached, sequence.num_forked)
        self._stats.observe("request_queue_time_seconds", self._clock() - sequence.arrival)

    def _commit_row(self, sequence: Sequence, row: Row, outcome: RowResult) -> list[Message]:
        if self._drafts and row.num_drafts:
            self._drafts.settle(sequence, row.num_drafts, len(outcome.tokens))
        before = sequence.num_tokens
        taken = take(sequence, row, outcome)
        self._queue.charge_tokens(sequence, sequence.num_tokens - before)
        self._stats.generation_tokens += len(outcome.tokens)
        self._stats.forced_tokens += outcome.num_forced
        messages: list[Message] = []
        if taken.kept or outcome.prompt_logprobs:
            tokens, logprobs = outcome.tokens[: taken.kept], outcome.logprobs[: taken.kept]
            messages.append(TokenOut(sequence.id, tokens, logprobs, outcome.prompt_logprobs))
        if taken.failed:
            self._finish(sequence, FinishReason.ERROR)
            return [*messages, failure(sequence)]
        sequence.num_computed += len(row.tokens) - row.num_drafts + taken.num_stood
        if taken.ends:
            return [*messages, self._finish(sequence, *taken.ends)]
        self._cache.commit(lease_of(sequence), sequence.tokens, sequence.num_computed)
        if taken.num_stood < row.num_drafts:
            self._cache.shrink(lease_of(sequence), sequence.num_computed)
        if row.draws:
            self.slow_masks.begin(sequence, self._under_way)
        return messages

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_token: int | None = None) -> Done:
        """End a sequence in whatever state it is."""
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
            sequence.num_pinned = self.session_pins.note(sequence)
        elif sequence.status is Status.WAITING:
            self._queue.remove(sequence)
        sequence.status = Status.FINISHED
        del self._alive[sequence.id]
        self.slow_masks.forget(sequence)
        if self._drafts:
            self._drafts.forget(sequence)
        self._stats.count_finished(reason)
        return Done(sequence.id, reason, sequence.usage, stop_token)

    def _leave(self, sequence: Sequence) -> None:
        """Give row, slot and pages back; the computed pages go to the tree. What is under way of it is for nothing."""
        for step in self._under_way:
            step.rows.pop(sequence.id, None)
        self._cache.release(lease_of(sequence), sequence.tokens, sequence.num_computed)
        self._running.remove(sequence)
        del self._by_row[sequence.row]
        self._free_rows.append(sequence.row)
        self._give_slot_back(sequence)
        sequence.lease, sequence.row, sequence.num_computed = None, -1, 0
