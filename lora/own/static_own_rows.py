"""``StaticOwnRows``: rows of adapters' own embeddings at fixed addresses, for captured forward passes."""

from __future__ import annotations

import torch
from torch import Tensor

from .own_weights import OwnStep


class StaticOwnRows:
    """The rows of a step's tokens that come from an adapter's own embedding.

    Args:
        num_tokens: largest number of tokens of a pass.
        width: size of a row, H.
        dtype: type of the rows.
        device: device of the passes.
    """

    def __init__(self, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = torch.zeros((num_tokens, width), dtype=dtype, device=device)
        self._is_own = torch.zeros(num_tokens, dtype=torch.bool, device=device)
        self._is_clear = True

    def fill(self, step: OwnStep | None, token_ids: Tensor) -> None:
        """Read the own rows of ``token_ids`` [T] for the next replay, without waiting for the device."""
        if not self._is_clear:
            self._is_own.zero_()
            self._is_clear = True
        for tokens, own in step.parts if step is not None else ():
            if own.embedding is None:
                continue
            rows, is_own = own.embedding.rows_of(token_ids[tokens])
            self._rows.index_copy_(0, tokens, rows)
            if is_own is None:
                self._is_own.index_fill_(0, tokens, True)
            else:
                self._is_own.index_copy_(0, tokens, is_own)
            self._is_clear = False

    def embed(self, y: Tensor) -> None:
        """Replace rows of ``y`` [T, H], the embedding of a forward pass before it is scaled, with the own rows."""
        count = len(y)
        torch.where(self._is_own[:count, None], self._rows[:count].to(y.dtype), y, out=y)
