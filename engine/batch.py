"""The plan of one step: what the scheduler decided, in plain ints. Runner and sampler see this and nothing else.

A sequence that runs owns one *row* (a line of the page table and of the sampler's state, 0 <= row < max_num_seqs)
from its admission to its end or preemption. What a row holds for long is sent once, in ``RowStart``; a step then
carries only what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .types import Logprob, SamplingParams


@dataclass(frozen=True, slots=True)
class RowStart:
    """A sequence takes a row, new or resumed after preemption.

    Attributes:
        row: the row it takes; whatever was there before is forgotten.
        params: how its tokens are chosen.
        tokens: all its tokens so far, int32; the first ``num_prompt`` are the prompt, the rest were generated.
        stop_ids: the tokens that end it (the model's end tokens unless ignored, and ``params.stop_token_ids``);
            not to be drawn while fewer than ``params.min_tokens`` are generated.
        seed: the seed of its draws, always set.
        slot: the slot of its adapter, -1 for the base model.
        adapted_from: position of the first token that the adapter reads.
    """

    row: int
    params: SamplingParams
    tokens: Seq[int]
    num_prompt: int
    stop_ids: tuple[int, ...]
    seed: int
    slot: int = -1
    adapted_from: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: extend the KV by ``tokens``, then perhaps draw the next one, or the next ones.

    Drafts are guesses of the tokens that come next. They are computed together with the tokens that are known, and a
    token is drawn after the last of those and after each draft::

        tokens    | known ... known | draft 0 | draft 1 | ...
        lines                  drawn 0   drawn 1   drawn 2

    What is drawn after a draft counts if that draft and those before it are what was drawn in their places.

    A *line* is one of these places: a row of the step's logits.

    Attributes:
        row: its line in the page table.
        start: position of ``tokens[0]``, that is, num_computed before the step.
        tokens: the tokens to compute, drafts included. In a step that was planned ahead, ``not_yet(row)`` stands for a
            token that the step before draws.
        first_new_page: index in the row's page list where ``new_pages`` go.
        new_pages: page ids to write into the page table; the list then covers ``start + len(tokens)``.
        draws: the last of ``tokens`` but for the drafts is the sequence's last, so a next token is drawn.
        num_generated: tokens generated before this step (counts the draw: a seed's position).
        num_drafts: the last of ``tokens`` that are drafts; 0 for a row that does not draw.
        prompt_targets: where prompt logprobs are wanted, the last of the prompt's tokens at ``start + 1 ...``, whose
            probabilities this step's logits give.
    """

    row: int
    start: int
    tokens: Seq[int]
    first_new_page: int
    new_pages: tuple[int, ...]
    draws: bool
    num_generated: int
    num_drafts: int = 0
    prompt_targets: Seq[int] = ()

    @property
    def drafts(self) -> Seq[int]:
        """The drafts among ``tokens``."""
        return self.tokens[len(self.tokens) - self.num_drafts :]

    @property
    def num_positions(self) -> int:
        """Places at which a token is drawn."""
        return self.num_drafts + 1 if self.draws else 0


def not_yet(row: int) -> int:
    """What stands for the token that the step before draws for a row: a number below 0, whose inverse is the row."""
    return ~row


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the first ``num_tokens`` cells of page ``source`` to page ``target`` in all layers, before the step."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. ``starts`` are applied first, then ``copies`` in order, then the forward of ``rows``."""

    rows: tuple[Row, ...]
    starts: tuple[RowStart, ...] = ()
    copies: tuple[PageCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(row.tokens) for row in self.rows)

    @property
    def num_positions(self) -> int:
        """Places at which a token is drawn."""
        return sum(row.num_positions for row in self.rows)


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens may be drawn by the rows with a grammar.

    Attributes:
        lines: which lines these are of all that the batch has, rising.
        words: int32 [len(lines), ceil(V / 32)]; bit j of word w stands for token 32 * w + j.
        forced: for each line the only token that it allows, if it is to be taken without asking the model; else -1.
    """

    lines: tuple[int, ...]
    words: NDArray[np.int32]
    forced: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row brought.

    Attributes:
        tokens: the tokens drawn, up to the first that is not the draft at its place; empty if the row did not draw.
        logprobs: one for each of ``tokens`` if the sequence asked for them.
        prompt_logprobs: one for each of the row's ``prompt_targets``.
        num_forced: those of ``tokens`` that a mask left no choice about.
        failed: nothing could be drawn after ``tokens``, mostly since logits were not finite: the sequence ends with an
            error, its neighbours go on.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    num_forced: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a batch, one for each of its rows in the same order.

    Attributes:
        seconds: what the parts of the device's side took.
    """

    rows: tuple[RowResult, ...] = field(default_factory=tuple)
    seconds: Mapping[str, float] = field(default_factory=dict)


Read = Callable[[], StepResult]
"""Waits until a step's tokens are there, and reads them."""

Draw = Callable[[Callable[[], Masks] | None], Read]
"""Begins to draw a step's tokens, once what the step before drew has been read. It calls what it is given for the masks
when it needs them; None if no row has one."""
