"""The tokens of a step, sorted by the adapter that reads them.

rows of the batch   | row 0: 5 tokens, slot 2 | row 1: 3 tokens, base | row 2: 4 tokens, slot 0 from its 2nd on |
slot of each token    2  2  2  2  2             .  .  .                 .  0  0  0
segments              slot 0: tokens 9 10 11,  slot 2: tokens 0 1 2 3 4
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.lora import Segments

BASE = -1
"""The slot of tokens that the base model reads alone."""


def token_slots(
    slots: NDArray[np.int32], first: NDArray[np.int32], lengths: NDArray[np.int32], starts: NDArray[np.int32]
) -> NDArray[np.int32]:
    """The slot of each token of a step, [T] int32.

    Args:
        slots: [R] int32, the slot of each row's adapter, ``BASE`` for none.
        first: [R] int32, position in its sequence of the first token that the adapter reads: 0 but for activated LoRA.
        lengths: [R] int32, tokens of each row in this step.
        starts: [R] int32, position in its sequence of each row's first token.
    """
    of_tokens = np.repeat(slots, lengths)
    if not (first > starts).any():
        return of_tokens
    ends = np.cumsum(lengths)
    positions = np.arange(len(of_tokens)) + np.repeat(starts - (ends - lengths), lengths)
    of_tokens[positions < np.repeat(first, lengths)] = BASE
    return of_tokens


def make_segments(of_tokens: NDArray[np.int32], device: torch.device) -> Segments | None:
    """Sort the tokens of a step by slot; None if the base model reads all of them alone.

    Args:
        of_tokens: [T] int32, as from ``token_slots``.
        device: of the result.
    """
    order = np.argsort(of_tokens, kind="stable")
    ordered = of_tokens[order]
    num_base = int(np.searchsorted(ordered, 0))
    if num_base == len(ordered):
        return None
    ordered = ordered[num_base:]
    starts = np.flatnonzero(np.diff(ordered, prepend=BASE))
    bounds = np.append(starts, len(ordered)).astype(np.int32)
    return Segments(
        tokens=torch.from_numpy(order[num_base:].astype(np.int32)).to(device),
        slots=torch.from_numpy(ordered[starts]).to(device),
        starts=torch.from_numpy(bounds).to(device),
    )
