"""Sampling ops: token masks applied to logits, and the draw of tokens on a CPU and on a GPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import ops
from .backend import native_for
from .layouts.draw_params import DrawParams
from .triton import launch


def mask_logits(logits: Tensor, lines: Tensor, words: Tensor) -> None:
    """Set logits of forbidden tokens to -inf in some rows. Other rows are not changed.

    Args:
        logits: [S, V] float, changed in place.
        lines: [G] int64 on the logits' device, the rows to mask, each once; -1 for none if ``has_kernel`` is true.
        words: [G, ceil(V / 32)] int32 on the logits' device; bit j of word w is set if token 32 * w + j is allowed.

    Raises:
        IndexError: a row is outside of the logits. Not raised on a CUDA device.
    """
    if ops.on_triton(logits.device) and _takes_mask(logits, lines, words):
        from .triton import sampling_mask

        sampling_mask.mask_logits(logits, lines, words)
    elif (kernels := native_for(logits)) is not None and logits.dtype is torch.float32:
        kernels.sampling.mask_logits(logits, lines, words)
    else:
        logits[lines] = logits[lines].masked_fill_(_banned(words, logits.shape[1]), -torch.inf)


def _banned(words: Tensor, width: int) -> Tensor:
    """Unpack the words to [G, width] bool, inverted."""
    if words.device.type == "cpu":
        # numpy unpacks bits eight at a time from a table, which is much faster than shifting 32 copies of each word.
        bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, count=width, bitorder="little")
        return torch.from_numpy(bits).eq_(0).view(torch.bool)
    bit = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bit) & 1).flatten(1)[:, :width] == 0


def _takes_mask(logits: Tensor, lines: Tensor, words: Tensor) -> bool:
    types = ((torch.float32, logits), (torch.int64, lines), (torch.int32, words))
    return all(launch.is_of(dtype, tensor) for dtype, tensor in types)


def edit_logits(logits: Tensor, edits: Tensor) -> None:
    """Apply edits of single logits on a GPU, in launches that depend only on shapes.

    Args:
        logits: [S, V] float32 for which ``has_kernel`` is true; changed in place.
        edits: [N, 4] int32 on the logits' device, a list of ``kernels.layouts.logit_edits``, which may end before N.
    """
    from .triton import sampling_edits

    sampling_edits.edit_logits(logits, edits)


def draws_tokens(logits: Tensor) -> bool:
    """Return whether ``draw_tokens`` takes these logits: contiguous fp32 on a CPU with native kernels."""
    return logits.dtype is torch.float32 and native_for(logits) is not None


def draw_tokens(logits: Tensor, params: DrawParams) -> Tensor:
    """Draw a token of each row after top-k, top-p and min-p, as ``engine.sampling.top_k_top_p`` defines it.

    The token of a row depends only on the numbers of this row.

    Args:
        logits: [S, V] float32 for which ``draws_tokens`` is true.
        params: parameters of the S rows.

    Returns: [S] int64; -1 for rows whose largest logit is not finite. NaN counts as the largest.
    """
    kernels = native_for(logits)
    assert kernels is not None
    return kernels.sampling.draw_tokens(logits, params)


def has_kernel(logits: Tensor) -> bool:
    """Return whether ``draw_lines`` has kernels for these logits [n, V]: on a GPU, fp32 and contiguous."""
    return ops.on_triton(logits.device) and launch.is_of(torch.float32, logits)


def draw_lines(logits: Tensor, table: Tensor, lines: Tensor) -> Tensor:
    """Draw a token of each line on a GPU, as ``engine.sampling.top_k_top_p`` defines it.

    Random numbers are computed on the device from seed and position. The launches depend only on shapes and read
    nothing back, so that they can be captured.

    Args:
        logits: [S, V] float32 for which ``has_kernel`` is true.
        table: [R, 6] float64, parameters of rows: ``DrawTable``.
        lines: [S, 2] int64, the row of each line, -1 for none, and its position in the row's stream of random numbers.

    Returns: [S] int64; -1 for lines without a row and for lines whose largest logit is not finite. NaN counts as the
    largest.
    """
    from .triton import sampling_draw

    return sampling_draw.draw_lines(logits, table, lines)
