"""Log-probabilities of the tokens that a mask allows, relative to each other, from raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.layouts.staging import HostCopy
from ..types import MAX_ALLOWED_LOGPROBS, AllowedLogprobs


class AllowedDrawing:
    """The logprobs of allowed tokens at some positions of a step, while they are being computed.

    Args:
        masked: [n, V] float32, raw logits at n positions; -inf for tokens that the mask forbids.
        positions: index of each of these positions among the positions of the step.
    """

    def __init__(self, masked: Tensor, positions: Sequence[int]) -> None:
        self._positions = positions
        logprobs = torch.log_softmax(masked.double(), dim=1)
        top = torch.topk(logprobs, min(MAX_ALLOWED_LOGPROBS, masked.shape[1]), dim=1)
        self._copy = HostCopy(torch.stack([top.indices.double(), top.values], dim=1))

    def wait(self, tokens: Sequence[int]) -> dict[int, AllowedLogprobs]:
        """Return the logprobs by position; ``tokens`` are those that were drawn at all positions of the step."""
        columns = self._copy.wait().numpy()
        found = {}
        for position, (ids, logprobs) in zip(self._positions, columns, strict=True):
            kept = np.isfinite(logprobs)
            values = ids[kept].astype(np.int32).tobytes(), logprobs[kept].astype(np.float32).tobytes()
            found[position] = AllowedLogprobs(tokens[position], *values)
        return found
