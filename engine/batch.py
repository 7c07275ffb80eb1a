"""The plan of one step in plain ints, and its result. Runner and sampler know sequences only from this plan.

A running sequence owns a *row* of the page table and of the sampler's state, 0 <= row < max_num_seqs, from admission
until it ends or is preempted. Lasting facts are sent once, in ``RowStart``; a step contains only new facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .types import AllowedLogprobs, Logprob, SamplingParams


@dataclass(frozen=True, slots=True)
class RowStart:
    """Assignment of a row to a sequence, new or resumed after preemption. It replaces all former state of the row.

    Attributes:
        tokens: all tokens so far, int32: ``num_prompt`` of the prompt, then the generated ones.
        late_ids: tokens that are not drawn while fewer than ``params.min_tokens`` are generated: the model's end
            tokens, even if they are ignored, and ``params.stop_token_ids``.
        seed: seed of the row's draws, always set.
        slot: the slot of its adapter, -1 for the base model.
        adapted_from: position of the first token to which the adapter applies.
        is_long: whether its tokens are rotated as in sequences longer than the switch of the rotary embedding.
        state: slot of the recurrent state before its first token to compute; -1 for the initial state.
        vocab_size: number of tokens of its adapter's own vocabulary, 0 for the model's.
    """

    row: int
    params: SamplingParams
    tokens: Seq[int]
    num_prompt: int
    late_ids: tuple[int, ...]
    seed: int
    slot: int = -1
    adapted_from: int = 0
    is_long: bool = False
    state: int = -1
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: extend its KV by ``tokens``, then perhaps draw next tokens.

    Draft tokens are computed together with the known tokens. One token is drawn after the last known token and one
    after each draft: these are the row's *sampling positions*, each a row of the step's logits::

        tokens               | known ... known | draft 0 | draft 1 | ...
        sampling positions                   0         1         2

    The token drawn after a draft counts only if this draft and all before it were drawn at the preceding positions.

    Attributes:
        row: index in the page table.
        start: position of ``tokens[0]``: num_computed before the step.
        tokens: the tokens to compute, drafts included. In a step planned ahead, ``placeholder_token(row)`` takes the
            place of the token that the step before draws.
        first_new_page: index of ``new_pages`` in the row's page list.
        new_pages: page ids to write into the page table, which then covers ``start + len(tokens)``.
        draws: whether a next token is drawn: all tokens but the drafts are known then.
        num_generated: tokens generated before this step: the position of a draw in the seed's stream.
        num_drafts: number of ``tokens`` at the end that are drafts; 0 for a row that does not draw.
        prompt_targets: prompt tokens at ``start + 1 ...`` whose logprobs this step's logits give.
        checkpoints: (position, slot): the recurrent state after so many tokens of the sequence is saved in the slot.
        state: slot of the recurrent state before its first token; -1 for the slot to which the row's last step wrote
            it.
        num_pooled: number of ``tokens`` at the end whose hidden states are pooled; 0 if only the last one's may be.
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
    checkpoints: tuple[tuple[int, int], ...] = ()
    state: int = -1
    num_pooled: int = 0

    @property
    def drafts(self) -> Seq[int]:
        return self.tokens[len(self.tokens) - self.num_drafts :]

    @property
    def num_positions(self) -> int:
        """Number of the row's sampling positions."""
        return self.num_drafts + 1 if self.draws else 0

    @property
    def num_kept(self) -> int:
        """Number of ``tokens``, counted from the end, whose hidden states are read."""
        return max(self.num_positions + len(self.prompt_targets), self.num_pooled)


def placeholder_token(row: int) -> int:
    """Return the id that stands for the token that the step before draws for a row: ``~row``, which is negative."""
    return ~row


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copies the first ``num_tokens`` cells of page ``source`` to page ``target`` in all layers, before the step."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PageLoad:
    """Fills a page with the bytes of a page that was read from a pool of the same form, before the step."""

    page: int
    payload: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class StateLoad:
    """Fills a slot of recurrent states with the bytes of a state that was read from a pool of the same form."""

    slot: int
    payload: bytes | bytearray | memoryview


PoolWrite = PageCopy | PageLoad | StateLoad
"""A write to the pool before a step, in the order of a batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. ``starts`` are applied first, then ``copies`` in order; then the forward pass of ``rows`` runs."""

    rows: tuple[Row, ...]
    starts: tuple[RowStart, ...] = ()
    copies: tuple[PoolWrite, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def num_positions(self) -> int:
        """Number of sampling positions of all rows."""
        return sum(row.num_positions for row in self.rows)


class TokenCheck(Protocol):
    """Determines, at one position, after which tokens an end still fits in the token budget."""

    def fits(self, token: int) -> bool:
        """Return whether an end fits after ``token``, which the grammar allows. An end token always fits."""

    def alike(self, token: int) -> NDArray[np.int64]:
        """Return the tokens that are taken as equivalent to ``token``: they all fit, or none of them does."""

    def costs(self, token: int) -> Mapping[int, int]:
        """Return the cost of testing ``token`` and the tokens compared with it: the tokens tried for each of them."""

    def known(self) -> NDArray[np.int32]:
        """Return a mask of allowed tokens that are known to fit without a search. It has at least one token."""

    def limits(self) -> NDArray[np.int32]:
        """Return the mask of all allowed tokens that fit. This may take long."""


@dataclass(frozen=True, slots=True)
class Masks:
    """Token masks of the rows with a grammar.

    Attributes:
        positions: indices of the masked positions among the batch's sampling positions, ascending.
        words: int32 [len(positions), ceil(V / 32)]; bit j of word w is set if token 32 * w + j is allowed.
        forced: for each position the only allowed token, if it is taken without running the model; else -1.
        checks: by index in ``positions``, the check of the allowed tokens, if the token budget may exclude some of
            them.
    """

    positions: tuple[int, ...]
    words: NDArray[np.int32]
    forced: tuple[int, ...]
    checks: Mapping[int, TokenCheck] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowResult:
    """Result of a row.

    Attributes:
        tokens: the accepted drafts and the token drawn after them; empty if the row did not draw.
        logprobs: one for each of ``tokens`` if the sequence requested them.
        prompt_logprobs: one for each of the row's ``prompt_targets``.
        num_forced: number of ``tokens`` that a mask forced.
        is_limited: whether another token would have been drawn for one of ``tokens`` without the token budget.
        failed: whether no token could be drawn after ``tokens``, mostly because logits were not finite. The sequence
            then ends with an error, and the other rows continue.
        pooled: 32-bit floats, if ``SamplingParams.pooling`` requests them and the row draws.
        allowed: one for each of ``tokens`` if the sequence requested them.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    num_forced: int = 0
    failed: bool = False
    is_limited: bool = False
    pooled: bytes = b""
    allowed: tuple[AllowedLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a batch, one for each of its rows in order. ``seconds``: time of each part on the device's side."""

    rows: tuple[RowResult, ...] = field(default_factory=tuple)
    seconds: Mapping[str, float] = field(default_factory=dict)


class StepHandle(Protocol):
    """A launched step. ``draw`` and then ``result`` are called once each; neither is called for a dropped step."""

    @property
    def batch(self) -> Batch: ...

    def draw(self, masks: Callable[[], Masks] | None) -> None:
        """Start drawing the step's tokens. Draws depend on earlier ones, so the step before must have been read.

        Args:
            masks: waits for the step's masks and returns them; called when they are needed. None if no row has a mask.
        """

    def result(self) -> StepResult:
        """Wait for the drawn tokens and return the results of the rows."""
