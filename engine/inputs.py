"""From the plan of a step to the tensors of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """Tensors of one forward over a ragged batch of R rows and T tokens, on the model's device.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, the position of each token in its sequence.
        kv_loc: [T] int64, where its K and V go: ``page * page_size + position % page_size``.
        page_table: [R, P] int32, the pages of each row; entries past a row's last page are 0.
        query_start: [R + 1] int32, row r owns tokens ``query_start[r]:query_start[r + 1]``.
        context_len: [R] int32, tokens with KV after this step: start + len(tokens).
        max_query: the longest row's number of tokens.
        max_context: the largest of ``context_len``.
    """

    token_ids: Tensor
    positions: Tensor
    kv_loc: Tensor
    page_table: Tensor
    query_start: Tensor
    context_len: Tensor
    max_query: int
    max_context: int
