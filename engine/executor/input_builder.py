"""``InputBuilder``: from the plan of a step to the arrays and tensors of its forward pass, with the page table."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.layouts.staging import to_device
from ...kernels.layouts.state_arguments import StateBatch
from ...kernels.ops import SharedPrefixes, find_long_rows, find_shared_prefixes
from ...lora.lora_step import AdapterBank, LoraStep
from ...lora.own.own_weights import OwnStep
from ...lora.segments import BASE, token_slots
from ..batch import Batch, Row
from ..models.forward_inputs import ForwardInputs

Longs = NDArray[np.int64]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Tokens drawn by a step, as inputs of the next step, which is launched before the host has read them.

    Attributes:
        rows: [S] int64, the row of each token that is on the device.
        tokens: [S] int64 on the device; None if S is 0. The token of a row that fails may be any number.
        forced: tokens that the host knows without reading them, such as the only token that a mask allows, by row.
        vocab_size: number of tokens of the vocabulary; tokens are clamped to be below it.
    """

    rows: Longs
    tokens: Tensor | None
    forced: Mapping[int, int]
    vocab_size: int

    def enter(self, token_ids: Longs) -> Tensor | None:
        """Replace each ``placeholder_token(row)`` by the row's forced token, or by ~i for ``result[i]``.

        Returns:
            Tokens [S] on the device, None if none are needed.
        """
        pending = np.flatnonzero(token_ids < 0)
        if not len(pending):
            return None
        ids = {**{row: ~i for i, row in enumerate(self.rows.tolist())}, **self.forced}
        token_ids[pending] = [ids[row] for row in (~token_ids[pending]).tolist()]
        return None if self.tokens is None else self.tokens.clamp(0, self.vocab_size - 1)


def fill_in(token_ids: Tensor, drawn: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return token ids [T] with ``drawn[i]`` in place of each ~i."""
    if drawn is None:
        return token_ids
    return torch.where(token_ids < 0, drawn[(~token_ids).clamp_(min=0)], token_ids, out=out)


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens of a step whose last hidden states are computed, if they are not all of its tokens.

    They are the last tokens of some rows. Of all other tokens of prompts only K and V are needed, so the last layer's
    attention and MLP skip them.

    Attributes:
        tokens: [S] int64, their indices among the step's tokens, ascending.
        query_start: [R + 1] int32, row r has ``tokens[query_start[r]:query_start[r + 1]]``.
        max_query: largest number of kept tokens of a row.
        shared: as in ``HostInputs``, for these tokens.
        slots: [S] int32, as in ``HostInputs``.
    """

    tokens: Longs
    query_start: Ints
    max_query: int
    shared: SharedPrefixes | None = None
    slots: Ints | None = None

    def some_rows(self, first: int, end: int, before: int) -> KeptTokens:
        """Return the kept tokens of rows [first, end), before whose first token the step has ``before`` tokens."""
        begin, stop = self.query_start[first], self.query_start[end]
        query_start = self.query_start[first : end + 1] - begin
        return KeptTokens(
            tokens=self.tokens[begin:stop] - before,
            query_start=query_start,
            max_query=int(np.diff(query_start).max()),
            slots=None if self.slots is None else self.slots[begin:stop],
        )


class HostStates(NamedTuple):
    """Slots of recurrent states: ``StateBatch`` on the host, without the rows' tokens."""

    source: Ints
    target: Ints
    checkpoints: Ints


@dataclass(frozen=True, slots=True)
class HostInputs:
    """Arrays of one forward pass on the host: ``ForwardInputs`` before the copy to the device.

    Attributes:
        token_ids: [T] int64; ~i is replaced by ``drawn[i]``.
        positions: [T] int64, rows of the rotary tables.
        slots: [T] int32, the slot of each token's adapter, -1 for none; None if no row has an adapter.
        drawn: int64 on the device, tokens that the step before draws; None if all of ``token_ids`` are known.
        kept: the tokens whose hidden states are needed, None for all.
        states: slots of recurrent states; None in a model without.
    """

    token_ids: Longs
    positions: Longs
    kv_loc: Longs
    page_table: Ints
    query_start: Ints
    context_len: Ints
    max_query: int
    max_context: int
    shared: SharedPrefixes | None = None
    slots: Ints | None = None
    drawn: Tensor | None = None
    kept: KeptTokens | None = None
    states: HostStates | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.context_len)

    @property
    def num_kept(self) -> int:
        """S: hidden states that a forward pass returns."""
        return self.num_tokens if self.kept is None else len(self.kept.tokens)

    def some_rows(self, first: int, end: int) -> HostInputs:
        """Return the inputs of rows from a first one to before another, of a model without recurrent states."""
        begin, stop = self.query_start[first], self.query_start[end]
        query_start, context = self.query_start[first : end + 1] - begin, self.context_len[first:end]
        kept = self.kept
        assert self.states is None
        return replace(
            self,
            token_ids=self.token_ids[begin:stop],
            positions=self.positions[begin:stop],
            kv_loc=self.kv_loc[begin:stop],
            page_table=self.page_table[first:end],
            query_start=query_start,
            context_len=context,
            max_query=int(np.diff(query_start).max()),
            max_context=int(context.max()),
            shared=None,
            slots=None if self.slots is None else self.slots[begin:stop],
            kept=None if kept is None else kept.some_rows(first, end, int(begin)),
        )

    def hidden_index(self, tokens: Longs) -> Longs:
        """Return the indices of the hidden states of some tokens, all of them kept, in the forward pass's result."""
        return tokens if self.kept is None else np.searchsorted(self.kept.tokens, tokens)


class InputBuilder:
    """Builds the inputs of steps. It keeps the page table, so a step carries only the pages new in it.

    Args:
        long_offset: ``DecoderModel.long_offset``.
        has_states: whether the model has recurrent states. The working state of a row has the slot of its number.
        keeps_all: whether the hidden states of all tokens are needed, because a draft head reads them.

    Attributes:
        bank: the adapters on the device, None if absent.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        page_size: int,
        device: torch.device,
        bank: AdapterBank | None = None,
        long_offset: int = 0,
        has_states: bool = False,
        *,
        keeps_all: bool = False,
    ) -> None:
        self._page_size = page_size
        self._keeps_all = keeps_all
        self._device = device
        self.bank = bank
        self._slots = np.full(max_num_seqs, BASE, np.int32)
        self._adapted_from = np.zeros(max_num_seqs, np.int32)
        self._long_offset = long_offset
        self._rope_offsets = np.zeros(max_num_seqs, np.int64)  # added to the positions of a row
        # State slot that each row's next step reads.
        self._sources = np.arange(max_num_seqs, dtype=np.int32) if has_states else None
        self._pages = np.zeros((max_num_seqs, -(-max_model_len // page_size)), dtype=np.int32)

    @property
    def table_width(self) -> int:
        """Pages of the longest sequence."""
        return self._pages.shape[1]

    @property
    def max_context(self) -> int:
        """Tokens that fit into the pages of the longest sequence."""
        return self.table_width * self._page_size

    def build(self, batch: Batch, drawn: DrawnTokens | None = None) -> HostInputs:
        """Write the batch's new pages to the page table, and return the arrays of the step.

        Args:
            drawn: tokens that the step before draws; needed for a step that was planned ahead.
        """
        rows = batch.rows
        for start in batch.starts:
            self._slots[start.row], self._adapted_from[start.row] = start.slot, start.adapted_from
            self._rope_offsets[start.row] = self._long_offset * start.is_long
            if self._sources is not None:
                self._sources[start.row] = start.state
        for row in rows:
            if row.new_pages:
                end = row.first_new_page + len(row.new_pages)
                self._pages[row.row, row.first_new_page : end] = row.new_pages
        lengths = np.fromiter((len(row.tokens) for row in rows), np.int32, len(rows))
        starts = np.fromiter((row.start for row in rows), np.int32, len(rows))
        index = np.fromiter((row.row for row in rows), np.int64, len(rows))
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        context = starts + lengths
        # Position of a token = start of its row + its distance from the row's first token.
        positions = np.arange(query_start[-1], dtype=np.int64) + np.repeat(starts - query_start[:-1], lengths)
        page, cell = np.divmod(positions, self._page_size)
        kv_loc = self._pages[np.repeat(index, lengths), page].astype(np.int64) * self._page_size + cell
        max_context = int(context.max())
        pages = self._pages[index, : -(-max_context // self._page_size)]
        token_ids = _token_ids(rows)
        slots = self._token_slots(index, lengths, starts)
        return HostInputs(
            token_ids=token_ids,
            positions=positions + np.repeat(self._rope_offsets[index], lengths) if self._long_offset else positions,
            kv_loc=kv_loc,
            page_table=pages,
            query_start=query_start,
            context_len=context,
            max_query=int(lengths.max()),
            max_context=max_context,
            shared=find_shared_prefixes(pages, lengths, context, self._page_size, self._device),
            slots=slots,
            drawn=drawn.enter(token_ids) if drawn else None,
            kept=self._kept(rows, lengths, query_start, pages, context, slots),
            states=None if self._sources is None else self._states(rows, index, query_start, self._sources),
        )

    def to_tensors(self, inputs: HostInputs) -> ForwardInputs:
        """Copy the arrays of a step to the device."""
        whole = ForwardInputs(
            token_ids=fill_in(to_device(inputs.token_ids, self._device), inputs.drawn),
            positions=to_device(inputs.positions, self._device),
            kv_loc=to_device(inputs.kv_loc, self._device),
            page_table=to_device(inputs.page_table, self._device),
            query_start=to_device(inputs.query_start, self._device),
            context_len=to_device(inputs.context_len, self._device),
            max_query=inputs.max_query,
            max_context=inputs.max_context,
            shared=inputs.shared and inputs.shared.to(self._device),
            long=find_long_rows(
                inputs.page_table, np.diff(inputs.query_start), inputs.context_len, self._page_size, self._device
            ),
            lora=self._lora(inputs.slots),
            states=None if inputs.states is None else self._state_batch(inputs.states, inputs),
            own=self.own_step(inputs.slots),
        )
        kept = inputs.kept
        if kept is None:
            return whole
        of_kept = replace(
            whole,
            query_start=to_device(kept.query_start, self._device),
            max_query=kept.max_query,
            shared=kept.shared and kept.shared.to(self._device),
            long=None,
            lora=self._lora(kept.slots),
            own=self.own_step(kept.slots),
        )
        return replace(whole, kept=to_device(kept.tokens, self._device), of_kept=of_kept)

    @staticmethod
    def _states(rows: Sequence[Row], index: Longs, query_start: Ints, sources: Ints) -> HostStates:
        """Return the slots of a step. A row reads its own from its second step on."""
        source, target = sources[index], index.astype(np.int32)
        sources[index] = index
        resumed = np.fromiter((row.state for row in rows), np.int32, len(rows))
        source = np.where(resumed >= 0, resumed, source)
        checkpoints = np.full(query_start[-1], -1, np.int32)
        for first, row in zip(query_start.tolist(), rows, strict=False):
            for position, slot in row.checkpoints:
                checkpoints[first + position - row.start - 1] = slot
        return HostStates(source, target, checkpoints)

    def _state_batch(self, states: HostStates, inputs: HostInputs) -> StateBatch:
        source, target, checkpoints = (to_device(each, self._device) for each in states)
        query_start = to_device(inputs.query_start, self._device)
        return StateBatch(query_start, source, target, checkpoints, inputs.max_query)

    def _lora(self, slots: Ints | None) -> LoraStep | None:
        return None if slots is None or self.bank is None else self.bank.step(slots)

    def own_step(self, slots: Ints | None) -> OwnStep | None:
        """Return the adapters' weights in place of the model's, for tokens of these slots; None if absent."""
        return None if slots is None or self.bank is None else self.bank.own_step(slots)

    def _kept(
        self, rows: Sequence[Row], lengths: Ints, query_start: Ints, pages: Ints, context: Ints, slots: Ints | None
    ) -> KeptTokens | None:
        """Return the last tokens of each row whose hidden states are read; None for all tokens."""
        if self._keeps_all:
            return None
        counts = np.fromiter((row.num_kept for row in rows), np.int32, len(rows))
        if (counts == lengths).all():
            return None
        starts = np.zeros_like(query_start)
        np.cumsum(counts, out=starts[1:])
        tokens = last_tokens(query_start, counts)
        return KeptTokens(
            tokens=tokens,
            query_start=starts,
            max_query=int(counts.max()),
            shared=find_shared_prefixes(pages, counts, context, self._page_size, self._device),
            slots=None if slots is None else slots[tokens],
        )

    def _token_slots(self, rows: Longs, lengths: Ints, starts: Ints) -> Ints | None:
        """Return ``HostInputs.slots`` from the rows' indices, lengths and first positions."""
        if self.bank is None:
            return None
        slots = self._slots[rows]
        return token_slots(slots, self._adapted_from[rows], lengths, starts) if (slots >= 0).any() else None


def last_tokens(query_start: Ints, counts: NDArray[np.integer[Any]]) -> Longs:
    """Return the indices of the last ``counts[r]`` tokens of each row r in a step, ascending, int64."""
    ends = np.cumsum(counts)
    # A row's last tokens end where the next row begins.
    return np.arange(ends[-1], dtype=np.int64) + np.repeat(query_start[1:] - ends, counts)


def _token_ids(rows: Sequence[Row]) -> Longs:
    """[T] int64 from each row's tokens."""
    tokens = array("i")
    for row in rows:
        tokens.extend(row.tokens)
    return np.asarray(tokens, np.int64)
