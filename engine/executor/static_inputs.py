"""``StaticInputs``: input buffers at fixed addresses for forward passes that are captured or recorded."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...kernels.layouts.staging import refill, to_device
from ...kernels.layouts.state_arguments import StateBatch
from ...kernels.ops import StaticSharedPrefixes
from ...lora.lora_step import LoraStep
from ...lora.segments import StaticSegments
from ..models.forward_inputs import ForwardInputs
from .input_builder import HostInputs, HostStates, fill_in


class StaticInputs:
    """Static input buffers for captured passes up to a size. Passes of several sizes may read them, one at a time.

    Before the first step, and beyond the last row and token of a smaller step, the buffers hold padding: rows without
    tokens, and tokens without a cell of the KV pool (-1).

    Attributes:
        shared: buffers of shared prefixes.
        segments: buffers of the tokens with adapters.

    Args:
        has_states: whether the model has recurrent states.
        num_slots: largest number of adapters of a step.
    """

    def __init__(
        self,
        num_tokens: int,
        num_rows: int,
        table_width: int,
        device: torch.device,
        *,
        has_states: bool = False,
        num_slots: int = 0,
    ) -> None:
        self._num_tokens, self._num_rows = num_tokens, num_rows
        self._tokens = torch.zeros((3, num_tokens), dtype=torch.int64, device=device)
        self._tokens[2] = -1
        self._rows = torch.zeros(2 * num_rows + 1, dtype=torch.int32, device=device)
        self._page_table = torch.zeros((num_rows, table_width), dtype=torch.int32, device=device)
        # Source and target of each row, and the checkpoint of each token.
        self._states = torch.full((2 * num_rows + num_tokens,), -1, dtype=torch.int32, device=device)
        self._has_states = has_states
        self.shared = StaticSharedPrefixes(num_rows, device)
        self.segments = StaticSegments(num_tokens, device, num_slots)

    def inputs(
        self,
        num_tokens: int,
        num_rows: int,
        max_query: int,
        max_context: int,
        *,
        shares: bool = False,
        lora: LoraStep | None = None,
    ) -> ForwardInputs:
        """Return the inputs of a pass of this size, as views of the buffers.

        Args:
            shares: whether rows may share prefixes.
            lora: the LoRA part of the pass, which reads ``segments``.
        """
        token_ids, positions, kv_loc = (values[:num_tokens] for values in self._tokens)
        query_start = self._rows[self._num_rows :][: num_rows + 1]
        return ForwardInputs(
            token_ids=token_ids,
            positions=positions,
            kv_loc=kv_loc,
            page_table=self._page_table[:num_rows],
            query_start=query_start,
            context_len=self._rows[:num_rows],
            max_query=max_query,
            max_context=max_context,
            shared=self.shared.prefixes(num_rows) if shares else None,
            lora=lora,
            states=self._state_batch(query_start, num_tokens, num_rows, max_query) if self._has_states else None,
        )

    def _state_batch(self, query_start: Tensor, num_tokens: int, num_rows: int, max_query: int) -> StateBatch:
        source, target, checkpoints = self._states.split((self._num_rows, self._num_rows, self._num_tokens))
        return StateBatch(query_start, source[:num_rows], target[:num_rows], checkpoints[:num_tokens], max_query)

    def token_ids(self, num_tokens: int) -> Tensor:
        """[num_tokens] int64, a view of the buffer."""
        return self._tokens[0, :num_tokens]

    def positions(self, num_tokens: int) -> Tensor:
        """[num_tokens] int64, a view of the buffer."""
        return self._tokens[1, :num_tokens]

    def fill(self, step: HostInputs) -> None:
        """Copy a step into the buffers, without waiting for the device."""
        tokens = np.zeros((3, self._num_tokens), np.int64)
        tokens[2] = -1
        tokens[:, : step.num_tokens] = step.token_ids, step.positions, step.kv_loc
        refill(self._tokens, tokens)
        fill_in(self._tokens[0], step.drawn, out=self._tokens[0])
        rows = np.zeros(len(self._rows), np.int32)
        rows[: step.num_rows] = step.context_len
        starts = rows[self._num_rows :]
        starts[: step.num_rows + 1] = step.query_start
        starts[step.num_rows + 1 :] = step.num_tokens
        refill(self._rows, rows)
        height, width = step.page_table.shape
        self._page_table[:height, :width] = to_device(step.page_table, self._page_table.device)
        if step.shared is not None:
            self.shared.fill(step.shared)
        if step.slots is not None:
            self.segments.fill(step.slots)
        if step.states is not None:
            self._fill_states(step.states)

    def _fill_states(self, states: HostStates) -> None:
        slots = np.full(len(self._states), -1, np.int32)
        slots[: len(states.source)] = states.source
        slots[self._num_rows :][: len(states.target)] = states.target
        slots[2 * self._num_rows :][: len(states.checkpoints)] = states.checkpoints
        refill(self._states, slots)
