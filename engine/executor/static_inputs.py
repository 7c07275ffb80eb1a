"""Inputs that stay where they are, for forward passes that are recorded once and replayed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...kernels.layouts.staging import refill, to_device
from ...kernels.ops import StaticSharedPrefixes
from ...lora.lora_step import LoraStep
from ...lora.segments import StaticSegments
from ..models.forward_inputs import ForwardInputs, HostInputs, fill_in


class StaticInputs:
    """Memory for the inputs of steps up to some size. Passes of several sizes may read it, one at a time.

    At first, and behind what a step fills, tokens have no cell and rows no tokens.

    Args:
        num_tokens: the most of a step.
        num_rows: the most of a step.
        table_width: pages of the longest sequence.
        device: of the model.

    Attributes:
        shared: room for shared prefixes.
        segments: room for the tokens of adapters.
    """

    def __init__(self, num_tokens: int, num_rows: int, table_width: int, device: torch.device) -> None:
        self._num_tokens, self._num_rows = num_tokens, num_rows
        self._tokens = torch.zeros((3, num_tokens), dtype=torch.int64, device=device)
        self._tokens[2] = -1
        self._rows = torch.zeros(2 * num_rows + 1, dtype=torch.int32, device=device)
        self._page_table = torch.zeros((num_rows, table_width), dtype=torch.int32, device=device)
        self.shared = StaticSharedPrefixes(num_rows, device)
        self.segments = StaticSegments(num_tokens, device)

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
        """What a pass of so many tokens and rows reads.

        Args:
            num_tokens: T of the pass.
            num_rows: R of the pass.
            max_query: the most tokens that a row may have.
            max_context: the most tokens with KV that a row may have.
            shares: whether rows may share prefixes.
            lora: the adapters' part, over ``segments``.
        """
        token_ids, positions, kv_loc = (line[:num_tokens] for line in self._tokens)
        return ForwardInputs(
            token_ids=token_ids,
            positions=positions,
            kv_loc=kv_loc,
            page_table=self._page_table[:num_rows],
            query_start=self._rows[self._num_rows :][: num_rows + 1],
            context_len=self._rows[:num_rows],
            max_query=max_query,
            max_context=max_context,
            shared=self.shared.prefixes(num_rows) if shares else None,
            lora=lora,
        )

    def token_ids(self, num_tokens: int) -> Tensor:
        """[T] int64, those of a step of so many tokens."""
        return self._tokens[0, :num_tokens]

    def fill(self, step: HostInputs) -> None:
        """Make the next replay this step; waits for nothing."""
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
