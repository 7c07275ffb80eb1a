"""Runs the engine's decoder with adapters, as the engine would: rows of tokens, each with a slot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.engine.models.forward_inputs import ForwardInputs
from rootgraft.lora.lora_step import AdapterBank, LoraStep
from rootgraft.lora.segments import token_slots
from support.models.paged_run import pool, with_states

PAGE = 16
PAGES_PER_ROW = 4


class AdaptedRun:
    """Rows of up to 64 tokens; each row has one adapter's slot, from one position on."""

    def __init__(
        self, model: DecoderModel, bank: AdapterBank, slots: list[int], first: list[int] | None = None
    ) -> None:
        self._model, self._bank = model, bank
        self._slots, self._first = slots, first or [0] * len(slots)
        self._kv = pool(model, PAGES_PER_ROW * len(slots), PAGE, len(slots))
        self._done = [0] * len(slots)

    def extend(self, chunks: list[list[int]]) -> list[Tensor]:
        """Compute the next tokens of all rows (some may have none) in one step: logits [len(chunk), V] of each."""
        rows = [row for row, chunk in enumerate(chunks) if chunk]
        lengths = np.array([len(chunks[row]) for row in rows], np.int32)
        starts = np.array([self._done[row] for row in rows], np.int32)
        of_tokens = token_slots(
            np.array([self._slots[row] for row in rows], np.int32),
            np.array([self._first[row] for row in rows], np.int32),
            lengths,
            starts,
        )
        own = self._bank.own_step(of_tokens)
        inputs = replace(self._inputs(rows, chunks, starts, lengths, self._bank.step(of_tokens)), own=own)
        hidden = self._model.forward(inputs, self._kv)
        logits = self._model.logits(hidden, self._bank.head_step(of_tokens), own)
        for row, length in zip(rows, lengths.tolist(), strict=True):
            self._done[row] += length
        parts = dict(zip(rows, logits.split(lengths.tolist()), strict=True))
        return [parts.get(row, logits[:0]) for row in range(len(chunks))]

    def _inputs(
        self,
        rows: list[int],
        chunks: list[list[int]],
        starts: np.ndarray,
        lengths: np.ndarray,
        lora: LoraStep | None,
    ) -> ForwardInputs:
        table = torch.arange(PAGES_PER_ROW * len(self._slots), dtype=torch.int32).view(-1, PAGES_PER_ROW)
        positions = [torch.arange(start, start + n) for start, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
        cells = [row * PAGES_PER_ROW * PAGE + place for row, place in zip(rows, positions, strict=True)]
        context = torch.from_numpy(starts + lengths)
        inputs = ForwardInputs(
            token_ids=torch.tensor([token for row in rows for token in chunks[row]]),
            positions=torch.cat(positions),
            kv_loc=torch.cat(cells),
            page_table=table[rows],
            query_start=torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)),
            context_len=context,
            max_query=int(lengths.max()),
            max_context=int(context.max()),
            lora=lora,
        )
        return with_states(inputs, self._model, rows, starts.tolist())
