"""Random walks within a budget of tokens: a token is drawn and then tested, as the sampler does (``limited_draw``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootgraft.engine.sampling.limited_draw import MAX_TESTS, MAX_TRIES

Tokens = NDArray[np.int64]


def allowed_tokens(row: NDArray[np.int32]) -> Tokens:
    """Return the tokens whose bits of a mask are set, in order."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def draw_within(matcher: Any, row: NDArray[np.int32], remaining: int, choose: Callable[[Tokens], int]) -> int:
    """Draw the next token so that an end of the answer still fits; the matcher does not accept it yet.

    Args:
        row: for the mask; overwritten by that of the grammar.
        remaining: tokens that may still be generated, this one included.
        choose: takes one of the tokens that it is given, at least one.
    """
    check = matcher.fill_grammar_mask(row, remaining)
    left = allowed_tokens(row)
    costs: dict[int, int] = {}
    for _ in range(1, MAX_TESTS):
        token = choose(left)
        if check is None or check.fits(token):
            return token
        left = np.setdiff1d(left, np.append(check.alike(token), token))
        costs.update(check.costs(token))
        if sum(costs.values()) > MAX_TRIES or not len(left):
            break
    return choose(allowed_tokens(check.known() & row))
