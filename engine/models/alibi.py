"""ALiBi (https://arxiv.org/abs/2108.12409): a bias of each score by the distance from query to key, as a rotation.

The bias ``slope * (position of the key - position of the query)`` is the score of further dimensions in front of each
head's own. A pair of them is multiplied by ``[[1, -p(t)], [p(t), 1]]`` where a rotary embedding has ``[[cos, -sin],
[sin, cos]]``. So a query's pair (a, 0) at position i becomes ``(a, a p(i))``, a key's pair (0, 1) at position j becomes
``(-p(j), 1)``, and their product is ``a (p(i) - p(j))``. No op is other than a rotary embedding's and attention's, and
models without ALiBi compute nothing more.

All numbers on which a weight of the softmax depends are exact in bfloat16, which has 8 bits: p is the position modulo
256 in three pairs and its quotient by 256 in three others, and ``-slope / scale of the scores`` is a sum of three
numbers of 8 bits. What is rounded, ``a p(i)``, is the same for all keys of a query.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checkpoint.model_config import ALIBI_DIMS

_BASE = 256  # numbers below it are exact in bfloat16
_PIECES = 3  # numbers of 8 bits that make one of float32
_PAIRS = ALIBI_DIMS // 2


def alibi_slopes(num_heads: int, largest: float) -> Tensor:
    """Return the slope of each head, [heads] fp32, all above 0.

    Args:
        largest: negative logarithm to base 2 of the smallest slope, if the number of heads is a power of two.
    """
    powers = 2 ** math.ceil(math.log2(num_heads))
    slopes = 2.0 ** -(torch.arange(1, powers + 1, dtype=torch.float64) * (largest / powers))
    if powers != num_heads:  # every second slope of twice as many heads, and then some of those between
        slopes = torch.cat((slopes[1::2], slopes[::2]))[:num_heads]
    found: Tensor = slopes.float()
    return found


def position_table(max_positions: int, device: torch.device) -> Tensor:
    """Return ones, then the parts p of each position, in place of cosines and sines: [max_positions, ALIBI_DIMS] fp32.

    Raises:
        ValueError: positions are too large to be exact.
    """
    if max_positions > _BASE**2:
        raise ValueError(f"positions of ALiBi must be below {_BASE**2}, not {max_positions}")
    if device.type == "meta":
        return torch.empty(max_positions, ALIBI_DIMS, device=device)
    positions = torch.arange(max_positions)
    low, high = (part.float()[:, None].expand(-1, _PIECES) for part in (positions % _BASE, positions // _BASE))
    unused = torch.zeros(max_positions, _PAIRS - 2 * _PIECES)
    return torch.cat((torch.ones(max_positions, _PAIRS), low, high, unused), dim=1).to(device)


def pair_constants(slopes: Tensor, scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what the further dimensions are before the rotation: those of each query head, then those of all keys.

    Args:
        slopes: [heads] fp32.
        scale: factor of the scores.

    Returns:
        [(heads + 1) * ALIBI_DIMS], exact in ``dtype``, which is float32 or bfloat16.
    """
    rest, pieces = -slopes.double() / scale, []
    for _ in range(_PIECES):
        pieces.append(rest.to(torch.bfloat16).double())
        rest = rest - pieces[-1]
    low = torch.stack(pieces, dim=1)
    queries = torch.zeros(len(slopes), ALIBI_DIMS, dtype=torch.float64)
    queries[:, :_PIECES], queries[:, _PIECES : 2 * _PIECES] = low, _BASE * low
    keys = torch.cat((torch.zeros(_PAIRS), torch.ones(_PAIRS))).double()
    return torch.cat((queries.flatten(), keys)).to(dtype).to(device)
