"""``ForwardInputs``: the tensors that one forward pass over a ragged batch reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.ops import SharedPrefixes
from ...lora.lora_step import LoraStep


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """Tensors of one forward pass over R rows and T tokens, on the model's device.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, the position of each token in its sequence.
        kv_loc: [T] int64, the cell of its K and V: ``page * page_size + position % page_size``.
        page_table: [R, P] int32, the pages of each row; entries past a row's last page are 0.
        query_start: [R + 1] int32, row r owns tokens ``query_start[r]:query_start[r + 1]``.
        context_len: [R] int32, tokens with KV after this step.
        max_query: the longest row's number of tokens.
        max_context: the largest of ``context_len``.
        shared: prefixes that rows read together, None for none.
        lora: the adapters' part in this step, None for none.
        kept: [S] int64, the tokens whose hidden states are wanted, None for all.
        of_kept: inputs of the last layer for these tokens, without their own ids, positions and cells.
    """

    token_ids: Tensor
    positions: Tensor
    kv_loc: Tensor
    page_table: Tensor
    query_start: Tensor
    context_len: Tensor
    max_query: int
    max_context: int
    shared: SharedPrefixes | None = None
    lora: LoraStep | None = None
    kept: Tensor | None = None
    of_kept: ForwardInputs | None = None
