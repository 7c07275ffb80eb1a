"""Log-probabilities of chosen tokens and of the best ones, from raw logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.layouts.staging import HostCopy, to_device
from ..types import MAX_LOGPROBS, Logprob
from .top_k_top_p import pad, row_slices, top_sorted

_CANDIDATES = 32  # the same for every request, so that ties resolve alike whatever a neighbour asks for

assert _CANDIDATES > MAX_LOGPROBS


def logprob_columns(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """What ``to_logprob`` needs, as one float64 tensor [n, 2 + 2 * num_top] on the device.

    Columns: the token's logprob, its rank (1 + the number of tokens strictly likelier), the ids of the ``num_top``
    best (all, if V is less), their logprobs. Ids and ranks are exact in float64, float32 logprobs as well.

    Args:
        logits: [n, V] float32, raw.
        tokens: [n] int64, the token at each position.
        num_top: 0 to 20.
    """
    num_top = min(num_top, logits.shape[1])
    return torch.cat([_columns(pad(logits[some]), tokens[some, None], num_top) for some in row_slices(logits)])


def _columns(logits: Tensor, chosen: Tensor, num_top: int) -> Tensor:
    logprobs = torch.log_softmax(logits, dim=1)
    rank = 1 + (logits > logits.gather(1, chosen)).sum(1, keepdim=True)
    columns = [logprobs.gather(1, chosen), rank]
    if num_top:
        ids = top_sorted(logits, min(_CANDIDATES, logits.shape[1]))[1][:, :num_top]
        columns += [ids, logprobs.gather(1, ids)]
    return torch.cat([column.double() for column in columns], dim=1)


def to_logprob(token: int, columns: list[float], num_top: int) -> Logprob:
    """A row of ``logprob_columns`` as a value; ``num_top`` may be less than the columns hold."""
    held = len(columns) // 2 - 1
    ids, logprobs = columns[2 : 2 + held], columns[2 + held :]
    top = tuple((int(id_), logprob) for id_, logprob in zip(ids[:num_top], logprobs[:num_top], strict=True))
    return Logprob(token, columns[0], int(columns[1]), top)


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, next_tokens: Sequence[int], num_top: int) -> Callable[[], list[Logprob]]:
    """The logprobs of a prompt's tokens, each given the tokens before it.

    Args:
        logits: [N, V] float32, raw; row i is the model's output at position i.
        next_tokens: the N tokens that stand at positions i + 1; N is not 0.
        num_top: how many of the best to name, 0 to 20 and at most V.

    Returns: what waits for them.
    """
    tokens = to_device(np.asarray(next_tokens, np.int64), logits.device)
    columns = HostCopy(logprob_columns(logits, tokens, num_top))
    return lambda: [
        to_logprob(token, row, num_top) for token, row in zip(next_tokens, columns.wait().tolist(), strict=True)
    ]
