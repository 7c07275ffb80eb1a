"""A step in the making, and a step under way."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from ..batch import Batch, PageCopy, Row, RowStart, placeholder_token
from ..kv_cache.prefix_cache import Lease
from ..sequence.sequence import Sequence


@dataclass(slots=True)
class StepPlan:
    """A step in the making.

    It may be made while the step before is under way. A row of that step which draws is taken to draw one token: a
    sequence then has one token more than is known, and more of them have KV.

    Attributes:
        budget: tokens left to give.
        began: when.
        before: the rows of the step under way by sequence id, none if all tokens are known.
        rows: what was given, by sequence id.
        starts: the rows that are taken.
        copies: of pages.
    """

    budget: int
    began: float
    before: Mapping[int, Row] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    starts: list[RowStart] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)

    @property
    def batch(self) -> Batch:
        """The plan as it stands."""
        return Batch(tuple(self.rows.values()), tuple(self.starts), tuple(self.copies))

    def span(self, sequence: Sequence) -> tuple[int, int]:
        """From where to where a sequence wants tokens computed: all that have no KV when this step begins."""
        row = self.before.get(sequence.id)
        if row is None:
            return sequence.num_computed, sequence.num_tokens
        return sequence.num_computed + len(row.tokens), sequence.num_tokens + row.draws

    def give(self, sequence: Sequence, start: int, end: int, *, draws: bool) -> None:
        """Let a sequence compute tokens ``start`` to ``end``, for which its lease has pages.

        Args:
            draws: these are the last ones, so that the next is drawn.
        """
        first, pages = lease_of(sequence).take_changes()
        is_drawing = end > sequence.num_tokens  # in the step under way
        self.rows[sequence.id] = Row(
            row=sequence.row,
            start=start,
            tokens=array("i", (placeholder_token(sequence.row),)) if is_drawing else sequence.tokens[start:end],
            first_new_page=first,
            new_pages=pages,
            draws=draws,
            num_generated=sequence.num_generated + is_drawing,
            prompt_targets=_targets(sequence, start, end),
        )
        self.budget -= end - start

    def take_back(self, sequence: Sequence) -> None:
        """Give a sequence nothing after all."""
        if row := self.rows.pop(sequence.id, None):
            self.budget += len(row.tokens)

    def begin(self, sequence: Sequence) -> None:
        """A sequence has taken a row and a lease: tell the device, and have copied what the lease needs."""
        if copy := lease_of(sequence).take_copy():
            self.copies.append(copy)
        self.starts.append(
            RowStart(
                sequence.row,
                sequence.params,
                sequence.tokens[:],
                sequence.num_prompt,
                # Under a grammar the mask keeps an answer from ending early: it knows where only the end is allowed.
                () if sequence.matcher else tuple(sequence.stop_ids),
                sequence.seed,
                sequence.slot,
                sequence.adapted_from,
            )
        )

    def add_drafts(self, sequence: Sequence, drafts: Seq[int]) -> None:
        """Put drafts behind the tokens of a sequence that draws; its lease has pages for them."""
        row = self.rows[sequence.id]
        tokens = array("i", row.tokens)
        tokens.extend(drafts)
        _, pages = lease_of(sequence).take_changes()
        self.rows[sequence.id] = replace(row, tokens=tokens, new_pages=row.new_pages + pages, num_drafts=len(drafts))


@dataclass(slots=True)
class StepInFlight:
    """A step from its plan to its commit.

    Attributes:
        batch: the plan.
        rows: of those sequences that have not left their row since, by sequence id.
        began: when its planning did.
        draft_worth: tokens that drafts would have been worth in it, if it was planned ahead and so has none.
    """

    batch: Batch
    rows: dict[int, Row]
    began: float
    draft_worth: float = 0.0

    @property
    def num_drawing(self) -> int:
        """Rows that draw."""
        return sum(row.draws for row in self.rows.values())


def _targets(sequence: Sequence, start: int, end: int) -> Seq[int]:
    """``Row.prompt_targets`` of a step that computes the tokens ``start`` to ``end``."""
    if sequence.num_scored >= sequence.num_prompt:
        return ()
    return sequence.tokens[max(start + 1, sequence.num_scored) : min(end + 1, sequence.num_prompt)]


def lease_of(sequence: Sequence) -> Lease:
    """The lease that every running sequence has."""
    assert sequence.lease is not None
    return sequence.lease
