"""Logprobs and ranks of chosen tokens, and the top logprobs, from raw logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.layouts.staging import HostCopy, to_device
from ..types import MAX_LOGPROBS, Logprob
from .top_k_top_p import pad, row_slices, top_sorted

_CANDIDATES = 32  # candidates for every request, so that ties resolve alike whatever other rows want

assert _CANDIDATES > MAX_LOGPROBS


def logprob_columns(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Return the logprobs of tokens and of the best ones: [n, 2 + 2 * num_top] float64 on the device.

    The columns are: the token's logprob; its rank (1 + the number of more likely tokens); the ids of the ``num_top``
    most likely tokens, or of all V tokens if V is less; the logprobs of these. Ids, ranks and float32 logprobs are
    exact in float64.

    ``logits`` [n, V] are float32 and raw, ``tokens`` [n] int64; ``num_top`` is 0 to 20.
    """
    num_top = min(num_top, logits.shape[1])
    return torch.cat([_columns(pad(logits[some]), tokens[some, None], num_top) for some in row_slices(logits)])


def named_columns(logits: Tensor, tokens: Tensor, names: Tensor) -> Tensor:
    """``logprob_columns`` with the tokens ``names`` [n, m], int64, in place of the best ones: [n, 2 + 2 * m]."""
    slices = row_slices(logits)
    return torch.cat([_named(pad(logits[some]), tokens[some, None], names[some]) for some in slices])


def _named(logits: Tensor, chosen: Tensor, names: Tensor) -> Tensor:
    logprobs = torch.log_softmax(logits, dim=1)
    rank = 1 + (logits > logits.gather(1, chosen)).sum(1, keepdim=True)
    columns = [logprobs.gather(1, chosen), rank, names, logprobs.gather(1, names)]
    return torch.cat([column.double() for column in columns], dim=1)


def _columns(logits: Tensor, chosen: Tensor, num_top: int) -> Tensor:
    logprobs = torch.log_softmax(logits, dim=1)
    rank = 1 + (logits > logits.gather(1, chosen)).sum(1, keepdim=True)
    columns = [logprobs.gather(1, chosen), rank]
    if num_top:
        ids = top_sorted(logits, min(_CANDIDATES, logits.shape[1]))[1][:, :num_top]
        columns += [ids, logprobs.gather(1, ids)]
    return torch.cat([column.double() for column in columns], dim=1)


def to_logprob(token: int, columns: list[float], num_top: int) -> Logprob:
    """Read a row of ``logprob_columns``; ``num_top`` may be less than the columns hold."""
    held = len(columns) // 2 - 1
    ids, logprobs = columns[2 : 2 + held], columns[2 + held :]
    top = tuple((int(id_), logprob) for id_, logprob in zip(ids[:num_top], logprobs[:num_top], strict=True))
    return Logprob(token, columns[0], int(columns[1]), top)


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, next_tokens: Sequence[int], num_top: int) -> Callable[[], list[Logprob]]:
    """Begin to compute the logprobs of a prompt's tokens, each given the tokens before it.

    Args:
        logits: [N, V] float32, raw; row i is the model's output at position i. N is not 0.
        next_tokens: the tokens at positions i + 1.
        num_top: number of top logprobs, 0 to 20 and at most V.

    Returns:
        A function that waits for the N logprobs.
    """
    tokens = to_device(np.asarray(next_tokens, np.int64), logits.device)
    columns = HostCopy(logprob_columns(logits, tokens, num_top))
    return lambda: [
        to_logprob(token, row, num_top) for token, row in zip(next_tokens, columns.wait().tolist(), strict=True)
    ]
