"""Which sequences get how many tokens in the next step, and what follows from the result.

There is one rule: a sequence has ``num_computed`` tokens in the KV pool and wants all ``num_tokens`` there; a step
gives it ``min(want, budget)``. A sequence that has just drawn a token wants one (decode), one that was just admitted
wants its prompt less what the cache had (prefill, in chunks), a preempted one wants whatever was evicted meanwhile.
No branch below asks which of these it is looking at, but for the order: those that want a single token go first, so
that a long prompt delays running streams by no more than one chunk. What budget and pages are left then goes to drafts.

Preemption is "finish without telling the client": the computed pages go to the tree, the sequence to the head of its
band of the queue, and it comes back as a prefix hit. The victim is the last admitted of the last band, so the first
admitted of the first band always makes progress and nobody preempts in circles. Batch sequences also give way when one
of another band is to be admitted and finds no row, page or budget.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from engine.admission import AdapterSlots, giving_way, prefix_in_progress, try_acquire
from engine.batch import Batch, PageCopy, Row, RowResult, RowStart, StepResult
from engine.cache import Lease, PrefixCache
from engine.drafts import Drafter
from engine.errors import EngineError
from engine.messages import Done, Failed, Message, TokenOut, failure_of
from engine.queue import WaitingQueue
from engine.sequence import MaskJob, Sequence, Status
from engine.stats import EngineStats
from engine.types import FinishReason, Priority


@dataclass(slots=True)
class _Plan:
    """A step in the making: tokens left to give, and what was given, by sequence id."""

    budget: int
    rows: dict[int, Row] = field(default_factory=dict)
    starts: list[RowStart] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)


class Scheduler:
    """The only writer of sequences and the queue.

    Args:
        cache: pages and tree.
        max_num_seqs: rows, that is, most running sequences.
        max_num_batched_tokens: tokens in one step.
        max_model_len: a sequence ends with reason length when it holds that many tokens.
        stats: counters to write to.
        slots: of adapters; None if there are none, and no sequence has one.
        drafter: proposes drafts; None for none.
        max_drafts: drafts in one step.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        stats: EngineStats,
        slots: AdapterSlots | None = None,
        drafter: Drafter | None = None,
        max_drafts: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._max_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._stats = stats
        self._slots = slots
        self._drafter = drafter
        self._max_drafts = max_drafts
        self._clock = clock
        self._began = 0.0  # the step under way
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
        self._began = self._clock()
        plan = _Plan(self._max_tokens)
        for sequence in self._in_turn():
            if plan.budget and sequence.status is Status.RUNNING:
                self._extend(sequence, plan)
        self._admit(plan)
        self._prefetch()
        if self._drafter:
            self._add_drafts(self._drafter, plan)
        return Batch(tuple(plan.rows.values()), tuple(plan.starts), tuple(plan.copies))

    def mask_jobs(self, batch: Batch) -> list[MaskJob]:
        """The masks that a batch needs, by the rows that draw under a grammar, in their order."""
        jobs, line = [], 0
        for row in batch.rows:
            sequence = self._by_row[row.row]
            if row.draws and sequence.matcher:
                early = max(0, sequence.params.min_tokens - sequence.num_generated)
                scored = sequence.params.logprobs is not None
                jobs.append(MaskJob(line, sequence.matcher, row.drafts, self._remaining(sequence), early, scored))
            line += row.num_lines
        return jobs

    def commit(self, batch: Batch, result: StepResult) -> list[Message]:
        """Take the result of a step over: tokens, pages for the tree, ends. Returns what the client is told."""
        messages: list[Message] = []
        for row, outcome in zip(batch.rows, result.rows, strict=True):
            messages += self._commit_row(self._by_row[row.row], row, outcome)
        self._stats.steps += 1
        self._stats.computed_tokens += batch.num_tokens
        self._stats.observe("iteration_tokens_total", batch.num_tokens)
        if self._drafter and batch.num_tokens == sum(row.num_lines for row in batch.rows):
            self._drafter.observe(batch.num_tokens, self._clock() - self._began)
        return messages

    def _in_turn(self) -> list[Sequence]:
        """Running sequences: those that want one token, then the others, each in order of admission."""
        return sorted(self._running, key=lambda sequence: sequence.prefilling)

    def _extend(self, sequence: Sequence, plan: _Plan) -> None:
        """Give a running sequence tokens and their pages, if need be at the cost of the last admitted."""
        count = min(sequence.num_tokens - sequence.num_computed, plan.budget)
        while not self._cache.grow(_lease(sequence), sequence.num_computed + count):
            victim = max(reversed(self._running), key=lambda running: running.priority)
            self._preempt(victim, plan)
            if victim is sequence:
                return
        self._plan_row(sequence, count, plan)

    def _plan_row(self, sequence: Sequence, count: int, plan: _Plan) -> None:
        start, end = sequence.num_computed, sequence.num_computed + count
        first, pages = _lease(sequence).take_changes()
        plan.rows[sequence.id] = Row(
            row=sequence.row,
            start=start,
            tokens=sequence.tokens[start:end],
            first_new_page=first,
            new_pages=pages,
            draws=end == sequence.num_tokens,
            num_generated=sequence.num_generated,
            prompt_targets=sequence.tokens[max(start + 1, sequence.num_scored) : min(end + 1, sequence.num_prompt)],
        )
        plan.budget -= count

    def _num_cached(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that are in the cache now."""
        return self._cache.match(sequence.path, sequence.tokens, sequence.reusable)

    def _add_drafts(self, drafter: Drafter, plan: _Plan) -> None:
        """Give the rows that draw drafts, in equal parts of the budget left; nobody is preempted for their pages."""
        drawing = [self._alive[number] for number, row in plan.rows.items() if row.draws]
        left = min(plan.budget, self._max_drafts)
        for behind, sequence in enumerate(drawing):
            limit = min(left // (len(drawing) - behind), self._remaining(sequence) - 1)
            drafts = drafter.propose(sequence, limit, len(drawing))
            if len(drafts) and self._cache.grow(_lease(sequence), sequence.num_tokens + len(drafts)):
                plan.rows[sequence.id] = _with_drafts(plan.rows[sequence.id], drafts, _lease(sequence))
                left -= len(drafts)

    def _preempt(self, sequence: Sequence, plan: _Plan) -> None:
        """Send a running sequence back to the head of its band; what it computed stays in the tree if it can."""
        planned = plan.rows.pop(sequence.id, None)
        if planned:
            plan.budget += len(planned.tokens)
        self._leave(sequence)
        sequence.status = Status.WAITING
        sequence.num_preempted += 1
        self._queue.requeue(sequence)
        self._stats.preemptions += 1

    def _admit(self, plan: _Plan) -> None:
        """Admit from the queue while rows, pages and budget last; batch sequences give way to others.

        A sequence whose prefix is just being computed by another is passed over, so that it finds it; at most as
        many as there are rows, which bounds the work of a step with a long queue. One whose adapter has no slot yet
        is passed over too: nobody waits with it.
        """
        if not self._has_room(plan) and not self._can_make_room():
            return
        passed_over = 0
        waiting: set[int] = set()  # adapters that have no slot
        for sequence in self._queue:
            if passed_over > self._num_rows:
                return
            if not self._has_room(plan) and not giving_way(self._cache, sequence, self._running):
                return
            if self._cache.sharing and prefix_in_progress(self._cache, sequence, self._running):
                passed_over += 1
                continue
            if not self._take_slot(sequence, waiting):
                continue
            lease = self._make_room(sequence, plan)
            if lease is None:
                self._give_slot_back(sequence)
                return
            self._start(sequence, lease, plan)
            count = min(sequence.num_tokens - sequence.num_computed, plan.budget)
            if self._cache.grow(lease, sequence.num_computed + count):
                self._plan_row(sequence, count, plan)

    def _has_room(self, plan: _Plan) -> bool:
        return bool(plan.budget and self._free_rows)

    def _can_make_room(self) -> bool:
        """Whether anybody who waits may have a running sequence give way. Cheap, since it is asked in every step."""
        batch = Priority.BATCH
        return any(other.priority is batch for other in self._running) and self._queue.has_before(batch)

    def _make_room(self, sequence: Sequence, plan: _Plan) -> Lease | None:
        """A lease for the sequence whose turn it is, if need be at the cost of running ones that give way to it."""
        lease = try_acquire(self._cache, sequence, self._running) if self._has_room(plan) else None
        late = giving_way(self._cache, sequence, self._running) if lease is None else []
        for victim in late:
            self._preempt(victim, plan)
            if self._has_room(plan) and (lease := try_acquire(self._cache, sequence, self._running)):
                break
        return lease

    def _take_slot(self, sequence: Sequence, waiting: set[int]) -> bool:
        """Whether a sequence has all it needs of the adapters: a slot, or nothing.

        Slots are asked for by the adapters that wait longest, at most as many as there are rows, and by those that
        are on the device already.
        """
        adapter = sequence.adapter
        if adapter < 0 or self._slots is None:
            return True
        if adapter in waiting or (len(waiting) >= self._num_rows and not self._slots.is_ready(adapter)):
            return False
        sequence.slot = self._slots.acquire(adapter)
        if sequence.slot < 0:
            waiting.add(adapter)
        return sequence.slot >= 0

    def _prefetch(self) -> None:
        """Have the adapters of those who come next loaded, also while rows or pages are what they wait for.

        Their place in the line for slots counts from now on: it would not if they asked only when a row is free.
        """
        if self._slots is not None:
            for adapter in {sequence.adapter: None for sequence in self._queue.head(self._num_rows)}:
                if adapter >= 0:
                    self._slots.prefetch(adapter)

    def _give_slot_back(self, sequence: Sequence) -> None:
        if sequence.slot >= 0 and self._slots is not None:
            self._slots.release(sequence.slot)
            sequence.slot = -1

    def _start(self, sequence: Sequence, lease: Lease, plan: _Plan) -> None:
        self._queue.admit(sequence)
        self._running.append(sequence)
        sequence.status, sequence.lease = Status.RUNNING, lease
        sequence.row = self._free_rows.pop()
        sequence.num_computed = lease.num_tokens
        self._by_row[sequence.row] = sequence
        if sequence.num_cached < 0:
            self._count_admission(sequence)
        if copy := lease.take_copy():
            plan.copies.append(copy)
        # Under a grammar the mask keeps an answer from ending early: it knows where nothing but the end is allowed.
        stop_ids = () if sequence.matcher else tuple(sequence.stop_ids)
        tokens = sequence.tokens[:]
        plan.starts.append(
            RowStart(
                sequence.row,
                sequence.params,
                tokens,
                sequence.num_prompt,
                stop_ids,
                sequence.seed,
                sequence.slot,
                sequence.adapted_from,
            )
        )

    def _count_admission(self, sequence: Sequence) -> None:
        sequence.num_cached = sequence.num_computed
        self._queue.charge_prompt(sequence)
        self._stats.prompt_tokens += sequence.num_prompt
        self._stats.prompt_tokens_cached += sequence.num_cached
        self._stats.observe("request_queue_time_seconds", self._clock() - sequence.arrival)

    def _commit_row(self, sequence: Sequence, row: Row, outcome: RowResult) -> list[Message]:
        num_stood = len(outcome.tokens) - (row.draws and not outcome.failed)
        if self._drafter and row.draws:
            self._drafter.settle(sequence, row.num_drafts, outcome.tokens)
        if sequence.matcher and row.draws:
            sequence.matcher.rollback(sequence.matcher.num_tokens - sequence.num_generated - num_stood)
        ends: tuple[FinishReason, int | None] | None = None
        kept, failed = 0, outcome.failed
        for place, token in enumerate(outcome.tokens):
            sequence.tokens.append(token)
            self._queue.charge_token(sequence)
            if sequence.matcher and place >= num_stood and not sequence.matcher.accept(token):
                failed = True
                break
            ends = self._end(sequence, token)
            kept += ends is None or ends[1] is None
        self._stats.generation_tokens += len(outcome.tokens)
        self._stats.forced_tokens += outcome.num_forced
        sequence.num_scored += len(outcome.prompt_logprobs)
        sequence.num_drafted += min(num_stood, row.num_drafts)
        sequence.num_forced += outcome.num_forced
        messages: list[Message] = []
        if kept or outcome.prompt_logprobs:
            logprobs = outcome.logprobs[:kept]
            messages.append(TokenOut(sequence.id, outcome.tokens[:kept], logprobs, outcome.prompt_logprobs))
        if failed:
            return [*messages, self._fail(sequence)]
        sequence.num_computed += len(row.tokens) - row.num_drafts + num_stood
        if ends:
            return [*messages, self._finish(sequence, *ends)]
        self._cache.commit(_lease(sequence), sequence.tokens, sequence.num_computed)
        if num_stood < row.num_drafts:
            self._cache.shrink(_lease(sequence), sequence.num_computed)
        return messages

    def _end(self, sequence: Sequence, token: int) -> tuple[FinishReason, int | None] | None:
        """Whether the token just appended ends its sequence: the reason, and the token if it is a stop token.

        A structured answer that is complete when its tokens are used up has not been cut: it ends with stop.
        """
        matcher = sequence.matcher
        if token in sequence.stop_ids and sequence.num_generated > sequence.params.min_tokens:
            return FinishReason.STOP, token
        if matcher and matcher.is_done:
            return FinishReason.STOP, token
        if self._remaining(sequence) > 0:
            return None
        return (FinishReason.STOP if matcher and matcher.is_whole else FinishReason.LENGTH), None

    def _remaining(self, sequence: Sequence) -> int:
        """Tokens that a sequence may still generate, by its own limit and by the model's length."""
        return min(sequence.remaining, self._max_model_len - sequence.num_tokens)

    def _fail(self, sequence: Sequence) -> Failed:
        """End a sequence that cannot go on, because of its logits or of its grammar."""
        self._finish(sequence, FinishReason.ERROR)
        reason = sequence.matcher and sequence.matcher.failure
        if reason:
            return Failed(sequence.id, "ModelError", f"The grammar of this request could not be followed: {reason}.")
        return Failed(sequence.id, "ModelError", "The model gave no token for this request that may be drawn.")

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_token: int | None = None) -> Done:
        """End a sequence in whatever state it is."""
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence.status is Status.WAITING:
            self._queue.remove(sequence)
        sequence.status = Status.FINISHED
        del self._alive[sequence.id]
        if self._drafter:
            self._drafter.forget(sequence.id)
        self._stats.count_finished(reason)
        return Done(sequence.id, reason, sequence.usage, stop_token)

    def _leave(self, sequence: Sequence) -> None:
        """Give row, slot and pages back; the computed pages go to the tree."""
        self._cache.release(_lease(sequence), sequence.tokens, sequence.num_computed)
        self._running.remove(sequence)
        del self._by_row[sequence.row]
        self._free_rows.append(sequence.row)
        self._give_slot_back(sequence)
        sequence.lease, sequence.row, sequence.num_computed = None, -1, 0


def _lease(sequence: Sequence) -> Lease:
    """The lease that every running sequence has."""
    assert sequence.lease is not None
    return sequence.lease


def _with_drafts(row: Row, drafts: Seq[int], lease: Lease) -> Row:
    """A planned row with drafts behind its tokens, and with the pages that the lease got for them."""
    tokens = array("i", row.tokens)
    tokens.extend(drafts)
    _, pages = lease.take_changes()
    return replace(row, tokens=tokens, new_pages=row.new_pages + pages, num_drafts=len(drafts))
