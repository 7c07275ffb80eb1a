"""Limited draw: draws another token if the drawn one leaves no room for an end of the answer in the token budget.

A token is drawn as without a budget and then tested (``TokenCheck``), because testing all tokens would take far longer.
If no end of the answer fits in the budget after the token, this token and those that are equivalent for the grammar are
excluded, and another token is drawn with the position's next random number. This is rejection sampling without
replacement: each token that fits is drawn with its share of the probability of all tokens that fit. A greedy draw takes
the most likely token that fits. Filters apply as without a budget. If none of the tokens that they keep fits, they are
applied again to the remaining tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.layouts.draw_params import DrawParams
from ..batch import TokenCheck
from .top_k_top_p import kept_weights, uniforms

# Limits at one position: on draws, and on the tokens that the searches of its tests try. When a limit is reached, a
# last draw is made among the tokens that are known to fit. The limits are needed because all streams wait for the
# tests: trying a token takes some microseconds, and most draws need some dozens of tries. Only a model whose tokens
# hardly ever fit the grammar reaches the limits.
MAX_TESTS = 64
MAX_TRIES = 2_000
_ATTEMPT = 0xD1B54A32D192ED03
Line = npt.NDArray[np.float32]


class LimitedLines:
    """The positions of a step at which the budget of tokens may exclude tokens.

    Args:
        logits: [N, V], edited and masked by the grammar.
        checks: check of each position that has one, by its index among the positions of the step; in the order of the
            lines.
        params: the ``COLUMNS`` of the draws and the seed, for all positions.
        num_generated: number of generated tokens before each position, for all positions.
    """

    def __init__(
        self,
        logits: Tensor,
        checks: Mapping[int, TokenCheck],
        params: npt.NDArray[np.void],
        num_generated: npt.NDArray[np.int64],
    ) -> None:
        self._logits = logits
        self._checks = checks
        self._params = params
        self._num_generated = num_generated

    def redraw(self, tokens: list[int]) -> list[int]:
        """Replace the tokens after which no end fits, -1 where nothing is left; return their positions."""
        changed = []
        for index, (position, check) in enumerate(self._checks.items()):
            if tokens[position] < 0 or check.fits(tokens[position]):
                continue
            line = self._logits[index].cpu().numpy().copy()
            params, at = self._params[position], int(self._num_generated[position])
            tokens[position] = _redrawn(line, check, params, at, tokens[position])
            changed.append(position)
        return changed


def _redrawn(line: Line, check: TokenCheck, params: Any, num_generated: int, token: int) -> int:
    """Draw until a token fits, without those that do not."""
    weights = _weights(line, params)
    costs: dict[int, int] = {}
    for attempt in range(1, MAX_TESTS + 1):
        left_out = np.append(check.alike(token), token)
        costs.update(check.costs(token))
        is_last = attempt == MAX_TESTS or sum(costs.values()) > MAX_TRIES
        line[left_out] = -np.inf
        if is_last and np.isfinite(line[known := _known(check, line)]).any():
            left_out = np.flatnonzero(~known)
            line[left_out] = -np.inf
        if weights is not None:
            weights[left_out] = 0
            # No token that the filters keep fits the limits.
            if not weights.any():
                weights = _weights(line, params)
        token = _draw(line, weights, params, num_generated, attempt)
        if token < 0 or is_last or check.fits(token):
            return token
    return -1


def _weights(line: Line, params: Any) -> npt.NDArray[np.int64] | None:
    """Return the weight of each token that the filters keep; None for a greedy draw, or if no token is left.

    Only allowed tokens are read, so the sums do not depend on the width of the logits, which may be larger because of
    other rows.
    """
    allowed = np.flatnonzero(np.isfinite(line))
    if params["temperature"] <= 0 or not len(allowed):
        return None
    draws = DrawParams.of(params, lambda values: torch.from_numpy(values.reshape(1, 1)), np.zeros(1))
    weights = np.zeros(len(line), dtype=np.int64)
    weights[allowed] = kept_weights(torch.from_numpy(line[None, allowed]), draws)[0].numpy()
    return weights


def _draw(line: Line, weights: npt.NDArray[np.int64] | None, params: Any, num_generated: int, attempt: int) -> int:
    """Draw by the attempt's own random number, or take the best; -1 if nothing is left."""
    if weights is None:
        best = int(line.argmax())
        return best if np.isfinite(line[best]) else -1
    seed = np.array([params["seed"]], dtype=np.uint64) + np.uint64(attempt * _ATTEMPT % (1 << 64))
    upto = np.cumsum(weights)
    if not upto[-1]:
        return -1
    u = float(uniforms(seed, np.array([num_generated], dtype=np.uint64))[0])
    return int(np.searchsorted(upto, min(int(u * int(upto[-1])), int(upto[-1]) - 1), side="right"))


def _known(check: TokenCheck, line: Line) -> npt.NDArray[np.bool_]:
    """Return which tokens are known to fit, bool [V]."""
    bits = np.unpackbits(check.known().view(np.uint8), bitorder="little").astype(np.bool_)
    fit: npt.NDArray[np.bool_] = np.zeros(len(line), dtype=np.bool_)
    fit[: len(bits)] = bits[: len(line)]
    return fit
