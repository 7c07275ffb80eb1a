"""Filters of sampling and the draw of a token for each row, which does not depend on the rest of the batch.

Sums of floats depend on their order, and the order inside torch depends on the shape of the whole batch. So only
``softmax`` adds floats across a row, which torch computes row by row (rows start at multiples of 64 columns, so that
their alignment is equal too). Probabilities then become integers, *weights* in units of 2^-40: sums of integers are
exact in every order. A token less likely than 2^-40 has weight 0 and is never drawn.

Kept tokens, in order (``SamplingParams`` fixes it), with p the softmax after temperature:

    top_n_sigma   the logits that are at most n standard deviations of the finite logits below the largest; p is the
            softmax of those (Tang et al., arXiv 2411.07641)
    top_k   of those, the k largest logits, and every tie of the k-th
    top_p   of those, largest first (ties: lowest id first): the smallest set whose share of their mass reaches top_p,
            the token that crosses included
    min_p   of those, the tokens with p >= min_p * p(best token)

The best token passes all four.

Without top_k and top_p a token is drawn by a race: the token i with the largest weight_i / e_i wins, where the e_i are
exponential random numbers of the draw. Token i wins with probability weight_i / sum(weights). With similar weights,
such as a draft model's, mostly the same token wins (Gumbel-max coupling; Maddison et al., arXiv 1411.0030). To need few
random numbers, the race is run three times: between parts of the vocabulary, within the winner, within its winner.

On a CPU with native kernels, ``kernels.sampling_ops.draw_tokens`` does all of this, one row after another. On a GPU
``draw_lines`` does it, with sums of its own: there probabilities differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.layouts.draw_params import DrawParams

BLOCK = 64
PART = 32  # blocks
_ONE = float(1 << 40)  # the weight of probability 1
_SIGMA_BITS = 21
_WIDTHS = (128, 2048)  # best tokens of a row that are sorted before all of them are
_SLICE = {"cpu": 1 << 19, "gpu": 1 << 26}  # logits processed together
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, position): output ``position`` of the seed's SplitMix64 stream.

    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) mixes a counter, so any output is computed without the former ones.
    The seed is mixed first: the streams of seeds 1 and 2 would otherwise be one stream, shifted.
    """
    return (_bits(seeds, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def exponentials(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64], count: int
) -> npt.NDArray[np.float64]:
    """Return ``count`` exponential random numbers, above 0, for each (seed, position): [n, count].

    They are computed from a SplitMix64 stream whose seed is the output for (seed, position).
    """
    bits = _mix(_bits(seeds, positions)[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)
    return -np.log(((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)


def num_noise(vocab_size: int) -> int:
    """Return how many random numbers a race among ``vocab_size`` tokens needs.

    The numbers for parts of the vocabulary come last. So a row draws the same token if the logits are wider because of
    other rows.
    """
    return BLOCK + PART - (-vocab_size // (BLOCK * PART))


def _bits(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return _mix(_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))


def pad(logits: Tensor) -> Tensor:
    """Return ``logits`` [n, V], contiguous, with -inf columns up to a multiple of 64; copied only if necessary."""
    missing = -logits.shape[1] % BLOCK
    return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits.contiguous()


def _blocks(values: Tensor) -> Tensor:
    return values.view(len(values), -1, BLOCK)


def _block(values: Tensor, block: Tensor) -> Tensor:
    """Return block ``block`` [n, 1] of each row of ``values`` [n, V]: [n, 64]."""
    return _blocks(values).gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)


def row_slices(logits: Tensor) -> Iterator[slice]:
    """Cut [n, V] into slices of rows whose temporaries stay in a CPU's cache, or take at most 1 GiB of a GPU.

    If each operation allocated 12 MB, a CPU would spend more time on page faults than on the operation itself.
    """
    step = max(1, _SLICE["cpu" if logits.device.type == "cpu" else "gpu"] // logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


def draw_any(logits: Tensor, best: Tensor, draws: DrawParams, use_min_p: bool) -> Tensor:
    """Draw from all tokens, or from those that ``min_p`` keeps if any row has one, by a race.

    Args:
        logits: [n, V] float32.
        best: [n, 1], the row's maximum.
        draws: of the n rows; ``top_k`` and ``top_p`` are off.
        use_min_p: whether any row has a ``min_p``.

    Returns:
        The tokens, [n] int64.
    """
    assert draws.noise is not None
    probs = _probabilities(logits, best, draws)
    if use_min_p:
        probs = torch.where(probs >= draws.min_p * probs.amax(1, keepdim=True), probs, 0.0)
    weights = _weights(probs)
    of_blocks = _blocks(weights).sum(2)
    of_parts = F.pad(of_blocks, (0, -of_blocks.shape[1] % PART)).view(len(weights), -1, PART)
    in_block, in_part, of_part = draws.noise.split((BLOCK, PART, of_parts.shape[1]), dim=1)
    part = _winner(of_parts.sum(2), of_part)
    blocks = of_parts.gather(1, part[:, :, None].expand(-1, -1, PART)).squeeze(1)
    block = part * PART + _winner(blocks, in_part)
    return (block * BLOCK + _winner(_block(weights, block), in_block)).squeeze(1)


def _winner(weights: Tensor, noise: Tensor) -> Tensor:
    """Return the index [n, 1] of the largest weight / noise of each row, both [n, m]."""
    return (weights / noise).argmax(1, keepdim=True)


def draw_kept(logits: Tensor, best: Tensor, draws: DrawParams) -> Tensor:
    """Draw from the tokens that all filters keep, sorted by probability, then by id. Arguments as in ``draw_any``.

    Sorting the whole vocabulary is slow on a CPU, and mostly few tokens are kept. So a row first sorts its 128 best
    tokens. If tokens beyond them might be kept, it sorts its 2048 best, and then all. This affects the time, but not
    the result.
    """
    probs = _probabilities(logits, best, draws)
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    pending = torch.arange(len(logits), device=logits.device)
    for width in _widths(logits):
        tokens[pending], settled = _draw_sorted(logits, probs, draws, width)
        if width == logits.shape[1]:
            break
        unsettled = (~settled).nonzero().squeeze(1)
        if not len(unsettled):
            break
        pending, logits, probs = pending[unsettled], logits[unsettled], probs[unsettled]
        draws = draws.rows(unsettled)
    return tokens


def _probabilities(logits: Tensor, best: Tensor, draws: DrawParams) -> Tensor:
    """Return softmax((logits - best) / temperature), float32 [n, V].

    The maximum is subtracted first, so that a temperature near 0 gives exp(0) and exp(-inf), never inf - inf. Tokens
    that top_n_sigma excludes have probability 0.
    """
    below = logits - best
    if draws.top_n_sigma is not None:
        below.masked_fill_(logits < _least_within(logits, best, draws.top_n_sigma), -torch.inf)
    return torch.softmax(below.div_(draws.temperature), dim=1)


def _least_within(logits: Tensor, best: Tensor, top_n_sigma: Tensor) -> Tensor:
    """Return the least logit that top_n_sigma keeps in each row: [n, 1] float32, -inf where it is off.

    Distances from the best logit are summed as integers. The unit is 2^-21 of a power of two that no distance exceeds.
    Sums of integers do not depend on the order.
    """
    distance = torch.where(torch.isfinite(logits), best.double() - logits.double(), 0.0)
    exponent = torch.frexp(distance.amax(1, keepdim=True)).exponent
    units = (distance * torch.exp2((_SIGMA_BITS - exponent).double())).round_().to(torch.int64)
    count = torch.isfinite(logits).sum(1, keepdim=True).double()
    mean = units.sum(1, keepdim=True).double() / count
    variance = (units * units).sum(1, keepdim=True).double() / count - mean * mean
    sigma = variance.clamp_(min=0).sqrt_() * torch.exp2((exponent - _SIGMA_BITS).double())
    return torch.where(top_n_sigma > 0, (best.double() - top_n_sigma.double() * sigma).float(), -torch.inf)


def _widths(logits: Tensor) -> list[int]:
    """Return the widths to try. A GPU sorts all at once: to ask whether a width was enough is to wait for it."""
    size = logits.shape[1]
    return [*(width for width in _WIDTHS if width < size and logits.device.type == "cpu"), size]


def _draw_sorted(logits: Tensor, probs: Tensor, draws: DrawParams, width: int) -> tuple[Tensor, Tensor]:
    """Draw from the ``width`` best of each row; also return whether these were enough, bool [n]."""
    values, ids = top_sorted(logits, width)
    probs = probs.gather(1, ids)
    weights, kept, in_k = _kept(values, probs, draws)
    upto = (weights * kept).cumsum(1)
    chosen = _first_above(upto, _target(draws.u, upto[:, -1:]))
    # Tokens beyond the first ``width`` are at most as likely as the last of these. They can affect the draw if the kept
    # tokens include this last one or a tie with it. For top_p they can affect it if the tokens that top_k keeps do.
    reach = torch.where(draws.top_k == 0, kept, in_k)
    lowest = torch.where(reach, values, torch.inf).amin(1)
    return ids.gather(1, chosen).squeeze(1), (lowest > values[:, -1]) | ~torch.isfinite(values[:, 0])


def kept_weights(logits: Tensor, draws: DrawParams) -> Tensor:
    """Return the weights of the tokens that all filters keep, 0 for others: [n, V] int64; shapes as above."""
    probs = _probabilities(logits, logits.amax(1, keepdim=True), draws)
    values, ids = top_sorted(logits, logits.shape[1])
    weights, kept, _ = _kept(values, probs.gather(1, ids), draws)
    return torch.zeros_like(ids).scatter_(1, ids, weights * kept)


def _kept(values: Tensor, probs: Tensor, draws: DrawParams) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of the largest logits, which of them all filters keep, and which top_k keeps: [n, width]."""
    weights = _weights(probs)
    possible = weights > 0
    kth = values.gather(1, (draws.top_k.clamp(max=values.shape[1]) - 1).clamp_(min=0))
    no_k = draws.top_k == 0
    in_k = possible & (no_k | (values >= kth))
    mass = torch.where(no_k, int(_ONE), (weights * in_k).sum(1, keepdim=True))
    limit = torch.where(draws.top_p < 1, mass * draws.top_p, torch.inf)
    in_p = in_k & (weights.cumsum(1) - weights < limit)
    # The likeliest token stays even if top_p is 0.
    in_p[:, 0] = True
    return weights, in_p & (probs >= draws.min_p * probs[:, :1]), in_k


def top_sorted(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the ``width`` largest of each row, largest first, ties by ascending id: values and ids, [n, width] each.

    If several values tie for the last place, it is undefined which of them are included, unless ``width`` is the whole
    row.
    """
    if width == logits.shape[1]:
        values, ids = torch.sort(logits, dim=1, descending=True, stable=True)
        return values, ids
    ids = torch.topk(logits, width, dim=1, sorted=False).indices.sort(dim=1).values
    values, order = torch.sort(logits.gather(1, ids), dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _weights(probs: Tensor) -> Tensor:
    return (probs * _ONE).to(torch.int64)


def _target(u: Tensor, total: Tensor) -> Tensor:
    """Return floor(u * total), below ``total`` even where the product rounds up."""
    return torch.minimum((u * total).to(torch.int64), total - 1)


def _first_above(upto: Tensor, target: Tensor) -> Tensor:
    """Return the first index [n, 1] whose cumulated weight exceeds ``target``, in range even for NaN rows."""
    return torch.searchsorted(upto, target, right=True).clamp_(max=upto.shape[1] - 1)
