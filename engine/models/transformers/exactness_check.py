"""Check at start: a model's logits with our KV pool, in chunks and batches, against logits with its own attention.

Other parts of a model than attention may also depend on other tokens: recurrent states, convolutions, or positions that
the model counts itself. A list of such classes would never be complete, but a comparison of logits shows the
dependence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import ModelError
from ..forward_inputs import ForwardInputs
from ..kv_pool import KvPool
from ..model import Model

_PAGE = 4
# Number of tokens of each row in each step: rows alone and together, chunks of one token and of more.
_STEPS = ((1, 5), (7, 0), (3, 1), (1, 6))
NUM_TOKENS = 12
"""Tokens of each of the two prompts that are compared."""

_MOST_IN_FP32 = 1e-3
_MOST_IN_16_BITS = 0.1


def check_exactness(model: Model, prompts: Tensor, expected: Tensor) -> float:
    """Compute two prompts in chunks and batches and compare their logits.

    Args:
        prompts: [2, NUM_TOKENS] token ids.
        expected: [2, NUM_TOKENS, V], logits of the prompts with the model's own attention.

    Returns:
        Difference of the logits after a token relative to their size, at the third quartile of the tokens: another
        rounding may send a few tokens to other experts.

    Raises:
        ModelError: the logits differ by more than rounding.
    """
    pages = -(-NUM_TOKENS // _PAGE)
    kv = KvPool(model.config, 2 * pages, _PAGE, model.dtype, model.device)
    table = torch.arange(2 * pages, dtype=torch.int32).flip(0).view(2, pages)
    done = [0, 0]
    found = torch.empty_like(expected)
    for counts in _STEPS:
        chunks = {row: (done[row], done[row] + count) for row, count in enumerate(counts) if count}
        logits = model.logits(model.forward(_inputs(prompts, table, list(chunks.items()), model.device), kv))
        sizes = [end - start for start, end in chunks.values()]
        for (row, (start, end)), part in zip(chunks.items(), logits.split(sizes), strict=True):
            found[row, start:end] = part
            done[row] = end
    apart = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    error = float(apart.flatten().quantile(0.75))
    if not error <= (_MOST_IN_FP32 if model.dtype is torch.float32 else _MOST_IN_16_BITS):
        raise ModelError(
            f"{model.config.family}: its logits in chunks and batches are {error:.1g} from those of a whole prompt, "
            "relative to their size: it carries more than keys and values from token to token, which is not "
            "supported."
        )
    return error


def _inputs(
    prompts: Tensor, table: Tensor, chunks: Sequence[tuple[int, tuple[int, int]]], device: torch.device
) -> ForwardInputs:
    """Return the inputs of a step that extends some rows from a start to an end."""
    rows = [row for row, _ in chunks]
    places = [torch.arange(start, end) for _, (start, end) in chunks]
    cells = [table[row].long()[place // _PAGE] * _PAGE + place % _PAGE for row, place in zip(rows, places, strict=True)]
    lengths = torch.tensor([len(place) for place in places])
    context = torch.tensor([end for _, (_, end) in chunks], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    return ForwardInputs(
        token_ids=torch.cat([prompts[row, start:end] for row, (start, end) in chunks]),
        positions=torch.cat(places).to(device),
        kv_loc=torch.cat(cells).to(device),
        page_table=table[rows].to(device),
        query_start=starts.int().to(device),
        context_len=context.to(device),
        max_query=int(lengths.max()),
        max_context=int(context.max()),
    )
