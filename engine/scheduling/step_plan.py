"""Step plan: the rows, page tables and copies of a step, from its planning to its commit."""

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
    """One step. It is planned first, and then in flight until its result is committed.

    The step before may still be in flight. Each row of that step that draws is assumed to draw one token, so its
    sequence has one token more than is known.

    Where the tokens of a step go::

        |<------------------ budget ------------------->|
        |                  |<--- usual chunk --->|      |
        | single tokens    | prompts             | rest |

    A prompt that ends within the budget is computed to its end, even beyond the usual chunk: cut there it would wait a
    whole step for a few tokens. A longer prompt is cut at the usual chunk, so that sequences which draw in this step do
    not wait longer for it; if no sequence draws, it is cut at the budget. No prompt begins beyond the usual chunk.

    Attributes:
        budget: tokens left to give.
        began: when planning began.
        before: the rows of the step in flight by sequence id, none if all tokens are known.
        rows: planned rows by sequence id. While the step is in flight, a row is removed if its sequence ends or is
            preempted; its result is then ignored.
        starts: for each sequence admitted in this step, the assignment of its row and all that the row starts from.
        copies: copies of pages, and pages that are filled from outside the pool, in the order of admission.
        allowance: seconds for prompts; None if nothing limits them but tokens.
        num_prompt_tokens: tokens given to prompts.
        num_drawing: planned rows that draw.
        draft_gain: number of tokens that the step's drafts are expected to gain.
        draft_seconds: seconds for which a draft model computed these drafts.
        missed_gain: number of tokens that drafts would have gained in a step that has none because it was planned
            ahead.
        usual: tokens of a usual chunk, which the prompts of the step share.
        batch: work of the device, once the step is planned.
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
        """End the planning. Returns the batch, which is empty if nothing can be computed."""
        self.batch = Batch(tuple(self.rows.values()), tuple(self.starts), tuple(self.copies))
        return self.batch

    @property
    def num_drawing_now(self) -> int:
        """Rows that draw, without those that their sequences have left since the planning."""
        return sum(row.draws for row in self.rows.values())

    def can_go_on(self, sequence: Sequence) -> bool:
        """Return whether a sequence can be planned now.

        It cannot if the token that the step in flight draws is certainly its last one, or if filling the mask of its
        next token takes long and has not ended (``SlowMasks``).
        """
        row = self.before.get(sequence.id)
        if row is None or not row.draws:
            return not sequence.awaits_mask
        left = sequence.remaining - 1
        return left > 0 and not (sequence.matcher and sequence.matcher.is_slow(left))

    def in_order(self, running: Iterable[Sequence]) -> list[tuple[Sequence, int, int]]:
        """Return the sequences that can go on and the span they want: single tokens, then prompts, batches last."""
        ready = [(each, *self.span(each)) for each in running if self.can_go_on(each)]
        return sorted(ready, key=_turn)

    def span(self, sequence: Sequence) -> tuple[int, int]:
        """Return the positions, start and end, that a sequence wants computed: all without KV when the step begins."""
        row = self.before.get(sequence.id)
        if row is None:
            return sequence.num_computed, sequence.num_tokens
        return sequence.num_computed + len(row.tokens), sequence.num_tokens + row.draws

    @property
    def room(self) -> int:
        """Tokens that a new prompt may compute, if it is longer than that."""
        return max(0, min(self._most(0), self.usual - self.num_prompt_tokens))

    def share(self, start: int, wanted: int) -> int:
        """Return how many of the tokens from position ``start`` to ``wanted`` a sequence may compute.

        Only the budget limits a single token, which is not a chunk.
        """
        rest = wanted - start
        if rest == 1:
            return min(self.budget, 1)
        most, usual = self._most(start), self.usual - self.num_prompt_tokens
        if rest > most:
            return max(0, min(most, usual)) if self.num_drawing else most
        return rest if usual > 0 else 0

    def room_without(self, sequences: Iterable[Sequence]) -> int:
        """Return ``room`` if sequences gave back what they have."""
        rows = {each.id: self.rows[each.id] for each in sequences if each.id in self.rows}
        most = self.budget + sum(len(row.tokens) for row in rows.values())
        if self.allowance is not None:
            most = min(most, self.allowance.room(0, rows.keys()))
        others = self.num_prompt_tokens - sum(len(row.tokens) for row in rows.values() if _is_chunk(row))
        return max(0, min(most, self.usual - others))

    def _most(self, start: int) -> int:
        """Return how many tokens of a prompt from position ``start`` on fit in the step."""
        return self.budget if self.allowance is None else min(self.budget, self.allowance.room(start))

    def give(self, sequence: Sequence, start: int, end: int, *, draws: bool) -> None:
        """Let a sequence compute positions ``start`` to ``end``, for which its lease has pages.

        Args:
            draws: whether these are the sequence's last tokens, so that the next token is drawn.
        """
        lease = lease_of(sequence)
        first, pages = lease.take_changes()
        is_drawing = end > sequence.num_tokens  # in the step in flight
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
        """Return how many tokens a sequence computes in the step."""
        row = self.rows.get(sequence.id)
        return len(row.tokens) if row else 0

    def num_lacking(self, sequence: Sequence) -> int:
        """Return how many tokens a running sequence wants beyond those given; none while it awaits a mask."""
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
        """Start the row of an admitted sequence, and copy or fill the pages that its lease needs copied or filled."""
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
                # Under a grammar the mask excludes an early end, and makes exceptions where only the end is allowed.
                () if sequence.matcher else tuple(sequence.spec.stop_ids),
                sequence.spec.seed,
                sequence.slot,
                sequence.spec.adapted_from,
                sequence.path.namespace.is_long,
                lease.state,
                sequence.spec.vocab_size,
            )
        )

    def add_drafts(self, sequence: Sequence, drafts: Seq[int]) -> None:
        """Append drafts to the row of a sequence that draws; its lease has pages for them."""
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
    """Return a sequence's turn in the distribution of a step's tokens: 0 is first."""
    sequence, start, end = want
    if end - start <= 1:
        return 0
    return 2 if sequence.priority is Priority.BATCH else 1


def _is_chunk(row: Row) -> bool:
    """Whether a row without drafts computes a part of a prompt, and not a stream's next token."""
    return len(row.tokens) > 1 or not row.draws


def _prompt_targets(sequence: Sequence, start: int, end: int) -> Seq[int]:
    """``Row.prompt_targets`` of a step that computes positions ``start`` to ``end``."""
    if sequence.counts.num_scored >= sequence.num_prompt:
        return ()
    return sequence.tokens[max(start + 1, sequence.counts.num_scored) : min(end + 1, sequence.num_prompt)]


def lease_of(sequence: Sequence) -> Lease:
    assert sequence.lease is not None
    return sequence.lease
