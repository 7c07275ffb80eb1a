"""Packed token masks applied to logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import ops
from .backend import native_for
from .triton import launch


def mask_logits(logits: Tensor, lines: Tensor, words: Tensor) -> None:
    """Put -inf into lines of the logits where a token is not allowed. Other lines are not touched.

    Args:
        logits: [S, V] float, changed in place.
        lines: [G] int64 on the logits' device, each line once.
        words: [G, ceil(V / 32)] int32 on the logits' device; bit j of word w is set if token 32 * w + j is allowed.

    Raises:
        IndexError: a line is outside of the logits. Not on a CUDA device.
    """
    if ops.on_triton(logits.device) and launch.is_known(logits, words) and logits.dtype is torch.float32:
        from .triton import sampling_mask

        sampling_mask.mask_logits(logits, lines, words)
    elif (kernels := native_for(logits)) is not None and logits.dtype is torch.float32:
        kernels.mask_logits(logits, lines, words)
    else:
        logits[lines] = logits[lines].masked_fill_(_banned(words, logits.shape[1]), -torch.inf)


def _banned(words: Tensor, width: int) -> Tensor:
    """[G, width] bool, the bits of the words, inverted."""
    if words.device.type == "cpu":
        # numpy unpacks bits eight at a time from a table, which is far cheaper than shifting 32 copies of each word.
        bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, count=width, bitorder="little")
        return torch.from_numpy(bits).eq_(0).view(torch.bool)
    bit = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bit) & 1).flatten(1)[:, :width] == 0
