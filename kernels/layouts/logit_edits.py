"""Edits of single logits as a list that a kernel reads: logit biases, then penalties, then bans.

A list is [1 + n, 4] int32. Lines are sorted by kind, and the first line has the index at which the biases, the
penalties and the bans end. Each further line has the row of the logits, the token, and the bits of two numbers in fp32:

    bias      a number to add to the logit
    penalty   repetition penalty, which divides a logit above 0 and multiplies any other; a number to subtract
    ban       no numbers: the logit becomes -inf
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MOST_EDITS = 1 << 16
"""Edits of a list that a captured draw takes: the tokens of some twenty long answers with penalties."""

Edits = npt.NDArray[np.int32]
Part = tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32] | None, npt.NDArray[np.float32] | None]
"""A row of the logits, its tokens, each once, and two numbers of each, None for zeros."""


def pack_edits(biases: Sequence[Part], penalties: Sequence[Part], bans: Sequence[Part]) -> Edits:
    """Return the list of these edits. A token may be in several kinds, which apply in their order."""
    parts = [*biases, *penalties, *bans]
    counts = [sum(len(tokens) for _, tokens, _, _ in kind) for kind in (biases, penalties, bans)]
    edits = np.zeros((1 + sum(counts), 4), np.int32)
    edits[0, :3] = 1 + np.cumsum(counts)
    begin = 1
    for row, tokens, first, second in parts:
        lines = edits[begin : begin + len(tokens)]
        lines[:, 0], lines[:, 1] = row, tokens
        for column, values in ((2, first), (3, second)):
            if values is not None:
                lines[:, column] = values.astype(np.float32).view(np.int32)
        begin += len(tokens)
    return edits
