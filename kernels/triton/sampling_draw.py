"""Triton top-k, top-p and min-p draw without sorting the vocabulary.

In the order (logit, largest first; then id) each filter keeps a prefix of the row, and the drawn token is the first
whose prefix sum of weights exceeds a target. Weights are integers, so sums do not depend on their order, and a position
is found by counting, in three kernels.

    levels   for 16 thresholds, probability >= 2^-2 ... 2^-40: how many tokens of each chunk, and their weight
    pick     each row takes the highest threshold that keeps all tokens that matter, and lists its candidates by id:
             at most 2^m of them for a threshold of 2^-m, ten or a thousand of a hundred thousand
    draw     one program a row searches the candidates for the k-th logit, for the one where top_p is reached, for the
             one that is drawn, each digit by digit

``engine.sampling.top_k_top_p`` defines the draw; for the same probabilities this gives the same token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, cdiv, meta, power_of_two

CHUNK = 4096  # columns of a program of the first two kernels
_LEVELS = tl.constexpr(16)
_BLOCK = tl.constexpr(512)  # candidates looked at together
_BITS = tl.constexpr(4)  # of a digit
_RADIX = tl.constexpr(16)
_ONE = tl.constexpr(1 << 40)  # the weight of probability 1
_LAST = tl.constexpr((1 << 31) - 1)


@triton.jit
def _weight(p):
    """The integer weight of a probability."""
    return (p * 1099511627776.0).to(tl.int64)


@triton.jit
def _thresholds():
    """The probability from which a token belongs to each level: 2^-2, 2^-5, 2^-7 ... 2^-40, made of exponent bits."""
    return ((127 - (tl.arange(0, _LEVELS) + 1) * 5 // 2) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _ceil_times(mass, share):
    """The fp64 product rounded up to an integer."""
    product = mass.to(tl.float64) * share
    whole = product.to(tl.int64)
    return tl.where(whole.to(tl.float64) < product, whole + 1, whole)


@triton.jit(do_not_specialize=["chunks"])
def _levels(probs, counts, sums, width, chunks, CHUNK: tl.constexpr):
    """Program (r, c): of chunk c of row r, the number of tokens and their weight at each level, [n, chunks, levels]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    threshold = _thresholds()
    count = tl.zeros((_LEVELS,), tl.int64)
    total = tl.zeros((_LEVELS,), tl.int64)
    for start in range(0, CHUNK, _BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, _BLOCK)
        p = tl.load(probs + row * width + column, column < width, other=0.0)
        p = tl.where(p >= 0.0, p, 0.0)  # NaN belongs to no level
        belongs = p[None, :] >= threshold[:, None]
        count += tl.sum(belongs.to(tl.int64), 1)
        total += tl.sum(tl.where(belongs, _weight(p)[None, :], 0), 1)
    at = (row * chunks + chunk) * _LEVELS + tl.arange(0, _LEVELS)
    tl.store(counts + at, count)
    tl.store(sums + at, total)


@triton.jit
def _chosen_level(counts, sums, top_k, top_p, row, chunks, CHUNKS: tl.constexpr):
    """The first level in which the row's k tokens are, or the share top_p of all; the last one if there is none."""
    level, chunk = tl.arange(0, _LEVELS), tl.arange(0, CHUNKS)
    at = (row * chunks + chunk[:, None]) * _LEVELS + level[None, :]
    count = tl.sum(tl.load(counts + at, (chunk < chunks)[:, None], other=0), 0)
    total = tl.sum(tl.load(sums + at, (chunk < chunks)[:, None], other=0), 0)
    k = tl.load(top_k + row)
    one = tl.full((), _ONE, tl.int64)
    least = tl.maximum(_ceil_times(one, tl.load(top_p + row)), 1)  # of top_p 0 the likeliest token is left
    holds_all = tl.where(k > 0, count >= k, total >= least)
    return tl.min(tl.where(holds_all, level, _LEVELS - 1), 0)


@triton.jit(do_not_specialize=["chunks"])
def _pick(
    logits, probs, top_k, top_p, counts, sums, ids, values, shares, found, width, chunks, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (r, c): the candidates of chunk c of row r, by id, behind those of the chunks before it.

    Their ids, logits and probabilities go to [n, width], their number to found [n].
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    level = _chosen_level(counts, sums, top_k, top_p, row, chunks, CHUNKS)
    every = tl.arange(0, CHUNKS)
    of_chunk = tl.load(counts + (row * chunks + every) * _LEVELS + level, every < chunks, other=0)
    at = tl.sum(tl.where(every < chunk, of_chunk, 0), 0)
    if chunk == 0:
        tl.store(found + row, tl.sum(of_chunk, 0))
    threshold = ((127 - (level + 1) * 5 // 2) << 23).to(tl.float32, bitcast=True)
    for start in range(0, CHUNK, _BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, _BLOCK)
        p = tl.load(probs + row * width + column, column < width, other=0.0)
        belongs = p >= threshold
        position = row * width + at + tl.cumsum(belongs.to(tl.int32), 0) - 1
        tl.store(ids + position, column, belongs)
        tl.store(shares + position, p, belongs)
        tl.store(values + position, tl.load(logits + row * width + column, belongs, other=0.0), belongs)
        at += tl.sum(belongs.to(tl.int64), 0)


@triton.jit
def _keys(values, position, inside):
    """Integers in the order of the logits; -0 equals 0. Lanes outside the candidates get the smallest key."""
    value = tl.load(values + position, inside, other=0.0)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & _LAST)
    return tl.where(inside, key, -_LAST - 1).to(tl.int64)


@triton.jit
def _search(values, shares, number, lowest, highest, wanted, WEIGHTS: tl.constexpr):
    """The largest key such that the candidates from it upwards are at least ``wanted``: in weight, or in number.

    ``lowest`` if all together are less.
    """
    digit = tl.arange(0, _RADIX)
    shift = 0
    while ((highest - lowest) >> shift) >= _RADIX:
        shift += _BITS
    key = lowest
    while shift >= 0:
        threshold = key + (digit.to(tl.int64) << shift)
        reached = tl.zeros((_RADIX,), tl.int64)
        for start in range(0, number, _BLOCK):
            position = start + tl.arange(0, _BLOCK)
            inside = position < number
            amount = _weight(tl.load(shares + position, inside, other=0.0)) if WEIGHTS else inside.to(tl.int64)
            above = _keys(values, position, inside)[None, :] >= threshold[:, None]
            reached += tl.sum(tl.where(above, amount[None, :], 0), 1)
        digits = tl.sum(((reached >= wanted) & (digit > 0)).to(tl.int64), 0)
        key += digits << shift
        shift -= _BITS
    return key


@triton.jit
def _around(values, shares, number, key):
    """Weight above a key, weight of one token that has it, and how many have it."""
    above = tl.zeros((), tl.int64)
    one = tl.zeros((), tl.int64)
    equal = tl.zeros((), tl.int64)
    for start in range(0, number, _BLOCK):
        position = start + tl.arange(0, _BLOCK)
        inside = position < number
        weight = _weight(tl.load(shares + position, inside, other=0.0))
        found = _keys(values, position, inside)
        has = inside & (found == key)
        above += tl.sum(tl.where(inside & (found > key), weight, 0), 0)
        one = tl.maximum(one, tl.max(tl.where(has, weight, 0), 0))
        equal += tl.sum(has.to(tl.int64), 0)
    return above, one, equal


@triton.jit
def _draw(logit_ids, values, shares, found, top_k, top_p, min_p, u, tokens, width):
    """Program r: the token of row r, from its candidates. 0 if it has none, as where probabilities are NaN."""
    row = tl.program_id(0).to(tl.int64)
    logit_ids += row * width
    values += row * width
    shares += row * width
    number = tl.load(found + row).to(tl.int32)
    if number == 0:
        tl.store(tokens + row, tl.zeros((), tl.int64))
        return
    lowest = tl.full((), _LAST, tl.int64)
    highest = -lowest - 1
    likeliest = tl.zeros((), tl.float32)
    for start in range(0, number, _BLOCK):
        position = start + tl.arange(0, _BLOCK)
        inside = position < number
        key = _keys(values, position, inside)
        lowest = tl.minimum(lowest, tl.min(tl.where(inside, key, _LAST), 0))
        highest = tl.maximum(highest, tl.max(key, 0))
        likeliest = tl.maximum(likeliest, tl.max(tl.load(shares + position, inside, other=0.0), 0))
    kept = _kept_by_min_p(shares, number, tl.load(min_p + row) * likeliest)
    k = tl.load(top_k + row)
    mass = tl.full((), _ONE, tl.int64)
    if k > 0:
        key = _search(values, shares, number, lowest, highest, k, False)
        above, one, equal = _around(values, shares, number, key)
        mass = above + one * equal
        kept = tl.minimum(kept, mass)
    share = tl.load(top_p + row)
    if share < 1:
        wanted = tl.maximum(_ceil_times(mass, share), 1)
        key = _search(values, shares, number, lowest, highest, wanted, True)
        above, one, equal = _around(values, shares, number, key)
        needed = tl.minimum((wanted - above + one - 1) // one, equal)
        kept = tl.minimum(kept, above + one * needed)
    target = tl.minimum((tl.load(u + row) * kept.to(tl.float64)).to(tl.int64), kept - 1)
    key = _search(values, shares, number, lowest, highest, target + 1, True)
    above, one, equal = _around(values, shares, number, key)
    tl.store(tokens + row, _nth_with_key(logit_ids, values, number, key, (target - above) // one))


@triton.jit
def _kept_by_min_p(shares, number, least):
    """Weight of the candidates whose probability is ``least`` or more."""
    kept = tl.zeros((), tl.int64)
    for start in range(0, number, _BLOCK):
        position = start + tl.arange(0, _BLOCK)
        p = tl.load(shares + position, position < number, other=0.0)
        kept += tl.sum(tl.where(p >= least, _weight(p), 0), 0)
    return kept


@triton.jit
def _nth_with_key(logit_ids, values, number, key, n):
    """The id of the n-th candidate, by id and from 0, that has a key."""
    seen = tl.zeros((), tl.int64)
    token = tl.zeros((), tl.int64)
    for start in range(0, number, _BLOCK):
        position = start + tl.arange(0, _BLOCK)
        inside = position < number
        has = (inside & (_keys(values, position, inside) == key)).to(tl.int64)
        is_nth = (has > 0) & (seen + tl.cumsum(has, 0) == n + 1)
        token += tl.sum(tl.where(is_nth, tl.load(logit_ids + position, inside, other=0), 0).to(tl.int64), 0)
        seen += tl.sum(has, 0)
    return token


def draw_ranked(logits: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """``kernels.sampling_ops.draw_ranked``: the tokens, [n] int64."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for launch in _launches(logits, probs, top_k, top_p, min_p, u, tokens):
        launch.run()
    return tokens


def _launches(
    logits: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor, tokens: Tensor
) -> tuple[Launch, Launch, Launch]:
    rows, width = logits.shape
    chunks = cdiv(width, CHUNK)
    counts = top_k.new_empty((2, rows, chunks, _LEVELS.value))
    ids = logits.new_empty((rows, width), dtype=torch.int32)
    values, shares = logits.new_empty((2, rows, width))
    found = torch.empty_like(tokens)
    grid, level = (rows, chunks, 1), {"CHUNK": CHUNK}
    levels = Launch(_levels, grid, (probs, counts[0], counts[1], width, chunks), level)
    pick_args = (logits, probs, top_k, top_p, counts[0], counts[1], ids, values, shares, found, width, chunks)
    pick = Launch(_pick, grid, pick_args, {**level, "CHUNKS": power_of_two(chunks, 16)})
    draw = Launch(
        _draw, (rows, 1, 1), (ids, values, shares, found, top_k, top_p, min_p, u, tokens, width), {}, num_warps=8
    )
    return levels, pick, draw


def variants() -> Iterator[tuple[str, Launch]]:
    """Every compilation for vocabularies of up to 262,144 tokens, as they are padded."""
    n = 32
    kinds = (torch.int64, torch.float64, torch.float32, torch.float64)
    top_k, top_p, min_p, u = (meta(n, 1, dtype=kind) for kind in kinds)
    for width in (49_152, 128_256, 262_144):
        rows = meta(n, width, dtype=torch.float32)
        levels, pick, draw = _launches(rows, rows, top_k, top_p, min_p, u, meta(n, dtype=torch.int64))
        yield f"sampling_pick/{power_of_two(cdiv(width, CHUNK), 16)}chunks", pick
    yield "sampling_levels/all", levels
    yield "sampling_draw/all", draw
