"""Draft sampler: the token that a target is likeliest to draw, guessed from a draft model's probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from .sampler import Ints, Params, Sampler
from .top_k_top_p import draw_near, row_slices


class DraftSampler(Sampler):
    """The sampler of a draft model. It guesses where the target draws from all tokens; by rank it draws as the target.

    Args:
        width: of the neighbourhood in ``draw_near``.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, width: float = 0.05) -> None:
        super().__init__(max_num_seqs, vocab_size, device)
        self._width = width

    def _draw(self, logits: Tensor, best: Tensor, params: Params, num_generated: Ints, by_rank: bool) -> Tensor:
        if by_rank:
            return super()._draw(logits, best, params, num_generated, by_rank)
        draws = self._draws(params, num_generated)
        slices = row_slices(logits)
        return torch.cat([draw_near(logits[some], best[some], draws.rows(some), self._width) for some in slices])
