"""Step plan: the rows, page tables and page copies of a step, from its planning to its commit."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from ..batch import Batch, PoolWrite, Row, RowStart, placeholder_token
from ..kv_cache.prefix_cache import Lease
from ..sequence.sequence import Sequence
from ..types import Priority
from .chunk_budget import PrefillAllowance, usual_chunk


@dataclass(slots=True)
class StepPlan:
    """The plan of one step. A step is first planned, and is then in flight until its result is committed.

    The previous step may still be in flight. Each of its rows that samples is assumed to sample one token. So the row's
    sequence has one token more than the known ones.

    Where the tokens of a step go::

        |<------------------ budget ------------------->|
        |                  |<--- usual chunk --->|      |
        | single tokens    | prompts             | rest |

    A prompt that ends within the budget is computed to its end, even beyond the usual chunk. If it were cut there, it
    would need another step for a few tokens. A longer prompt is cut at the usual chunk, so that the sequences that
    sample in this step do not wait longer for it. If no sequence samples, the prompt is cut at the budget. No prompt
    begins beyond the usual chunk.

    Attributes:
        budget: number of tokens that are not yet distributed.
        began: monotonic time in seconds at which the planning began.
        before: rows of the step in flight by sequence id; empty if all tokens are known.
        rows: planned rows by sequence id. While the step is in flight, a row is removed if its sequence ends or is
            preempted; the row's result is then ignored.
        starts: for each sequence admitted in this step, the assignment of its row and the row's initial state.
        copies: copies of pages, and loads of pages from outside the pool, in the order of admission.
        allowance: time for prompts; None if only the number of tokens limits prompts.
        num_prompt_tokens: number of tokens given to prompts.
        num_drawing: number of planned rows that sample a token.
        draft_gain: expected number of tokens gained by the step's draft tokens.
        draft_seconds: seconds for which a draft model computed these draft tokens.
        missed_gain: expected number of tokens that draft tokens would have gained, if the step has none because it was
            planned ahead.
        usual: number of tokens of a usual chunk, which the prompts of the step share.
        batch: the device's work in this step; set by ``finish``.
    """

    budget: int
    began: float
    before: Mapping[int, Row] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    starts: list[RowStart] = field(default_factory=list)
    copies: list[PoolWrite] = field(default_factory=list)
    allowance: PrefillAllowance | None = None
    num_prompt_tokens: int = 0
    num_drawing: int = 0
    draft_gain: float = 0.0
    draft_seconds: float = 0.0
    missed_gain: float = 0.0
    usual: int = field(init=False)
    batch: Batch = field(init=False)

    def __post_init__(self) -> None:
        self.usual = usual_chunk(self.budget)

    def finish(self) -> Batch:
        """Finish the planning. Returns the batch, which is empty if nothing can be computed."""
        self.batch = Batch(tuple(self.rows.values()), tuple(self.starts), tuple(self.copies))
        return self.batch

    @property
    def num_drawing_now(self) -> int:
        """Number of rows that sample a token, without the rows whose sequences have left since the planning."""
        return sum(row.draws for row in self.rows.values())

    def can_go_on(self, sequence: Sequence) -> bool:
        """Return whether a sequence can be planned now.

        It cannot be planned if the token that it samples in the step in flight is certainly its last one, or if filling
        the mask of its next token takes long and has not finished (``SlowMasks``).
        """
        row = self.before.get(sequence.id)
        if row is None or not row.draws:
            return not sequence.awaits_mask
        left = sequence.remaining - 1
        return left > 0 and not (sequence.matcher and sequence.matcher.is_slow(left))

    def in_order(self, running: Iterable[Sequence]) -> list[tuple[Sequence, int, int]]:
        """Return the sequences that can be planned, each with its ``span``: single tokens first, batch class last."""
        ready = [(each, *self.span(each)) for each in running if self.can_go_on(each)]
        return sorted(ready, key=_turn)

    def span(self, sequence: Sequence) -> tuple[int, int]:
        """Return the start and end of the positions that a sequence needs computed in a step that begins now."""
        row = self.before.get(sequence.id)
        if row is None:
            return sequence.num_computed, sequence.num_tokens
        return sequence.num_computed + len(row.tokens), sequence.num_tokens + row.draws

    @property
    def room(self) -> int:
        """Number of tokens that a new prompt may compute, if the prompt is longer than that."""
        return max(0, min(self._most(0), self.usual - self.num_prompt_tokens))

    def share(self, start: int, wanted: int) -> int:
        """Return the number of tokens from position ``start`` to ``wanted`` that a sequence may compute.

        A single token is not a chunk, so only the budget limits it.
        """
        rest = wanted - start
        if rest == 1:
            return min(self.budget, 1)
        most, usual = self._most(start), self.usual - self.num_prompt_tokens
        if rest > most:
            return max(0, min(most, usual)) if self.num_drawing else most
        return rest if usual > 0 else 0

    def room_without(self, sequences: Iterable[Sequence]) -> int:
        """Return the value that ``room`` would have if the given sequences returned their tokens."""
        rows = {each.id: self.rows[each.id] for each in sequences if each.id in self.rows}
        most = self.budget + sum(len(row.tokens) for row in rows.values())
        if self.allowance is not None:
            most = min(most, self.allowance.room(0, rows.keys()))
        others = self.num_prompt_tokens - sum(len(row.tokens) for row in rows.values() if _is_chunk(row))
        return max(0, min(most, self.usual - others))

    def _most(self, start: int) -> int:
        """Return the largest number of tokens of a prompt from position ``start`` on that fit in the step."""
        return self.budget if self.allowance is None else min(self.budget, self.allowance.room(start))

    def give(self, sequence: Sequence, start: int, end: int, *, draws: bool) -> None:
        """Let a sequence compute positions ``start`` to ``end``, for which its lease has pages.

        Args:
            draws: whether these are the sequence's last tokens, so that the step samples its next token.
        """
        lease = lease_of(sequence)
        first, pages = lease.take_changes()
        is_drawing = end > sequence.num_tokens  # The previous step, still in flight, samples the sequence's token.
        self.rows[sequence.id] = Row(
            row=sequence.row,
            start=start,
            tokens=array("i", (placeholder_token(sequence.row),)) if is_drawing else sequence.tokens[start:end],
            first_new_page=first,
            new_pages=pages,
            draws=draws,
            num_generated=sequence.num_generated + is_drawing,
            prompt_targets=_prompt_targets(sequence, start, end),
            checkpoints=() if lease.states is None else lease.take_checkpoints(start, end),
            state=lease.take_resumed(),
            num_pooled=max(0, end - max(start, sequence.spec.pooled_from)),
        )
        self.budget -= end - start
        self.num_drawing += draws
        if _is_chunk(self.rows[sequence.id]):
            self.num_prompt_tokens += end - start
            if self.allowance is not None:
                self.allowance.take(sequence.id, start, end, is_cut=not draws)

    def num_given(self, sequence: Sequence) -> int:
        """Return the number of a sequence's tokens that the step computes."""
        row = self.rows.get(sequence.id)
        return len(row.tokens) if row else 0

    def num_lacking(self, sequence: Sequence) -> int:
        """Return the number of tokens that a running sequence needs beyond those given; 0 while it waits for a mask."""
        start, wanted = self.span(sequence)
        return 0 if sequence.awaits_mask else wanted - start - self.num_given(sequence)

    def take_back(self, sequence: Sequence) -> None:
        """Undo ``give``."""
        if row := self.rows.pop(sequence.id, None):
            lease_of(sequence).put_back(row.state)
            self.budget += len(row.tokens)
            self.num_drawing -= row.draws
            self.num_prompt_tokens -= len(row.tokens) if _is_chunk(row) else 0
            if self.allowance is not None:
                self.allowance.give_back(sequence.id)

    def begin(self, sequence: Sequence) -> None:
        """Assign the row of an admitted sequence. Record the page copies and page loads that its lease needs."""
        lease = lease_of(sequence)
        if copy := lease.take_copy():
            self.copies.append(copy)
        self.copies += lease.take_loads()
        self.starts.append(
            RowStart(
                sequence.row,
                sequence.params,
                sequence.tokens[:],
                sequence.num_prompt,
                # With a grammar, the mask excludes an early end, and makes exceptions where only the end is allowed.
                () if sequence.matcher else tuple(sequence.spec.late_ids),
                sequence.spec.seed,
                sequence.slot,
                sequence.spec.adapted_from,
                sequence.path.namespace.is_long,
                lease.state,
                sequence.spec.vocab_size,
            )
        )

    def add_drafts(self, sequence: Sequence, drafts: Seq[int]) -> None:
        """Append draft tokens to the row of a sequence that samples. The sequence's lease must have pages for them."""
        row = self.rows[sequence.id]
        tokens = array("i", row.tokens)
        tokens.extend(drafts)
        lease = lease_of(sequence)
        _, pages = lease.take_changes()
        self.rows[sequence.id] = replace(
            row,
            tokens=tokens,
            new_pages=row.new_pages + pages,
            num_drafts=len(drafts),
            checkpoints=(*row.checkpoints, *lease.take_drafted(sequence.num_tokens, len(drafts))),
        )


def _turn(want: tuple[Sequence, int, int]) -> int:
    """Return the rank of a sequence in the distribution of a step's tokens; 0 is first."""
    sequence, start, end = want
    if end - start <= 1:
        return 0
    return 2 if sequence.priority is Priority.BATCH else 1


def _is_chunk(row: Row) -> bool:
    """Return whether a row without drafts computes a part of a prompt, and not the next token of a stream."""
    return len(row.tokens) > 1 or not row.draws


def _prompt_targets(sequence: Sequence, start: int, end: int) -> Seq[int]:
    """Return ``Row.prompt_targets`` for a step that computes positions ``start`` to ``end``."""
    if sequence.counts.num_scored >= sequence.num_prompt:
        return ()
    return sequence.tokens[max(start + 1, sequence.counts.num_scored) : min(end + 1, sequence.num_prompt)]


def lease_of(sequence: Sequence) -> Lease:
    assert sequence.lease is not None
    return sequence.lease
