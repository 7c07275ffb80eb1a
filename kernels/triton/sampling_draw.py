"""Triton draw of a token for each line of logits: greedy, by rank after top-k, top-p and min-p, or by a race.

``engine.sampling.top_k_top_p`` defines the draw. Parameters and seeds are on the device. Random numbers are computed
there from a seed and a position, so the host only supplies a line's row and position, and never waits. The launches are
the same for all parameters, so that they can be captured; a program that a line does not need ends at once.

    stats       of each chunk of a line: largest logit, its token, and what top_n_sigma needs
    deviations  sums of distances from the best logit, for lines with top_n_sigma
    sums        the denominator of the softmax after temperature, in parts
    levels      for 16 thresholds of probability: how many tokens of each chunk, and their weight; for a race the weight
                of parts of the vocabulary
    pick        lists all tokens that may be drawn: those down to the highest sufficient threshold, sorted by level, and
                within a level by id
    draw        one program for each line searches the list, digit by digit of the logits, for the k-th logit, the last
                token within top_p and the drawn token; or it finds the winner of the race

    Without top_k, thresholds are between the largest probability and the smallest one that can matter to top_p. If a
    line's probabilities are concentrated, few tokens are listed; if they are even, each level has few tokens. Weights
    are integers, and parts of a line are added in a fixed order, so a line's token does not depend on other lines.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, cdiv, meta, power_of_two

CHUNK = 4096  # columns of a program
FIELDS = 6
"""Of a row of the table, float64: temperature, top_k, top_p, min_p, top_n_sigma, and the bits of the seed."""

_FIELDS = tl.constexpr(FIELDS)
_LEVELS = tl.constexpr(16)
_BLOCK = tl.constexpr(512)  # number of tokens processed together
_BITS = tl.constexpr(4)  # bits of a digit
_RADIX = tl.constexpr(16)
_ONE = tl.constexpr(1 << 40)  # the weight of probability 1
_LAST = tl.constexpr((1 << 31) - 1)
_INFINITY = tl.constexpr(float("inf"))
_SIGMA_BITS = tl.constexpr(21)
_ROUNDER = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: a number added to it is rounded to the nearest even integer
_RACE_BLOCK = tl.constexpr(64)  # tokens of the last race
_RACE_PART = tl.constexpr(32)  # blocks of the race before it
_PART = tl.constexpr(64 * 32)
_K_OCTAVES = tl.constexpr(16.0)  # octaves below the likeliest token over which the thresholds of a top_k are spread


@triton.jit
def _weight(p):
    """Return the integer weight of a probability; 0 for NaN."""
    return (tl.where(p >= 0.0, p, 0.0) * 1099511627776.0).to(tl.int64)


@triton.jit
def _ceil_times(mass, share):
    """Return the fp64 product rounded up to an integer."""
    product = mass.to(tl.float64) * share
    whole = product.to(tl.int64)
    return tl.where(whole.to(tl.float64) < product, whole + 1, whole)


@triton.jit
def _power(exponent):
    """Return 2 to the power of an integer, in fp64."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _row(lines, line):
    """Return the row of a line, -1 for a line that pads the launch."""
    return tl.load(lines + line * 2)


@triton.jit
def _is_random(table, row):
    return (row >= 0) & (tl.load(table + row * _FIELDS, row >= 0, other=0.0) > 0)


@triton.jit
def _is_ranked(table, row):
    return (tl.load(table + row * _FIELDS + 1) > 0) | (tl.load(table + row * _FIELDS + 2) < 1)


@triton.jit
def _best(tops, line, chunks, CHUNKS: tl.constexpr):
    """Return the largest logit of a line."""
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(tops + line * chunks + chunk, chunk < chunks, other=-_INFINITY), 0)


@triton.jit
def _scale(tops, lows, line, chunks, CHUNKS: tl.constexpr):
    """Return the binary exponent of the largest distance of a finite logit from the best, as ``frexp`` defines it."""
    chunk = tl.arange(0, CHUNKS)
    low = tl.min(tl.load(lows + line * chunks + chunk, chunk < chunks, other=_INFINITY), 0)
    distance = _best(tops, line, chunks, CHUNKS).to(tl.float64) - low.to(tl.float64)
    exponent = ((distance.to(tl.int64, bitcast=True) >> 52) & 2047) - 1022
    return tl.where(distance > 0, exponent, 0)


@triton.jit
def _least(table, row, tops, lows, finite, units, squares, line, chunks, CHUNKS: tl.constexpr):
    """Return the least logit that top_n_sigma keeps in a line; -inf if it is off."""
    factor = tl.load(table + row * _FIELDS + 4)
    least = tl.full((), -_INFINITY, tl.float32)
    if factor > 0:
        chunk = tl.arange(0, CHUNKS)
        at = line * chunks + chunk
        count = tl.sum(tl.load(finite + at, chunk < chunks, other=0), 0).to(tl.float64)
        mean = tl.sum(tl.load(units + at, chunk < chunks, other=0), 0).to(tl.float64) / count
        square = tl.sum(tl.load(squares + at, chunk < chunks, other=0), 0).to(tl.float64) / count
        variance = square - mean * mean
        exponent = _scale(tops, lows, line, chunks, CHUNKS)
        sigma = tl.sqrt(tl.where(variance > 0, variance, 0.0)) * _power(exponent - _SIGMA_BITS)
        least = (_best(tops, line, chunks, CHUNKS).to(tl.float64) - factor * sigma).to(tl.float32)
    return least


@triton.jit
def _exp(x, best, temperature, least):
    """Return the numerator of a probability, 0 for tokens that top_n_sigma excludes."""
    return tl.where(x >= least, tl.exp((x - best) / temperature), 0.0)


@triton.jit(do_not_specialize=["chunks"])
def _stats(logits, lines, tops, arguments, lows, finite, width, chunks, CHUNK: tl.constexpr):
    """Program (s, c): for chunk c of line s the largest logit, its first token, and the least finite logit.

    The number of finite logits is written too. NaN counts as infinity, so that the draw of the line fails.
    """
    line, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _row(lines, line) < 0:
        return
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + line * width + column, column < width, other=-_INFINITY)
    x = tl.where(x == x, x, _INFINITY)
    top = tl.max(x, 0)
    is_finite = (x > -_INFINITY) & (x < _INFINITY)
    at = line * chunks + chunk
    tl.store(tops + at, top)
    tl.store(arguments + at, tl.min(tl.where(x == top, column, _LAST), 0))
    tl.store(lows + at, tl.min(tl.where(is_finite, x, _INFINITY), 0))
    tl.store(finite + at, tl.sum(is_finite.to(tl.int32), 0))


@triton.jit(do_not_specialize=["chunks"])
def _deviations(
    logits, lines, table, tops, lows, units, squares, width, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Program (s, c): sums of the distances from the best logit, and of their squares, in chunk c of line s."""
    line, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = _row(lines, line)
    if not _is_random(table, row):
        return
    if tl.load(table + row * _FIELDS + 4) <= 0:
        return
    best = _best(tops, line, chunks, CHUNKS).to(tl.float64)
    step = _power(-_scale(tops, lows, line, chunks, CHUNKS) + _SIGMA_BITS)
    unit = tl.zeros((), tl.int64)
    square = tl.zeros((), tl.int64)
    for start in range(0, CHUNK, _BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, _BLOCK)
        x = tl.load(logits + line * width + column, column < width, other=-_INFINITY)
        is_finite = (x > -_INFINITY) & (x < _INFINITY)
        distance = tl.where(is_finite, best - x.to(tl.float64), 0.0) * step
        whole = ((distance + _ROUNDER) - _ROUNDER).to(tl.int64)
        unit += tl.sum(whole, 0)
        square += tl.sum(whole * whole, 0)
    tl.store(units + line * chunks + chunk, unit)
    tl.store(squares + line * chunks + chunk, square)


@triton.jit(do_not_specialize=["chunks"])
def _sums(
    logits, lines, table, tops, lows, finite, units, squares, totals, width, chunks, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (s, c): the sum of chunk c of the denominator of line s's softmax."""
    line, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = _row(lines, line)
    if not _is_random(table, row):
        return
    best = _best(tops, line, chunks, CHUNKS)
    least = _least(table, row, tops, lows, finite, units, squares, line, chunks, CHUNKS)
    temperature = tl.load(table + row * _FIELDS).to(tl.float32)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + line * width + column, column < width, other=-_INFINITY)
    tl.store(totals + line * chunks + chunk, tl.sum(_exp(x, best, temperature, least), 0))


@triton.jit
def _total(totals, line, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(totals + line * chunks + chunk, chunk < chunks, other=0.0), 0)


@triton.jit
def _thresholds(table, row, likeliest, width):
    """Return the probability from which a token belongs to each level, descending; the last one is 2^-40."""
    level = tl.arange(0, _LEVELS)
    highest = tl.log2(likeliest)
    # All tokens below this probability together cannot complete top_p's share.
    rest = tl.maximum(1.0 - tl.load(table + row * _FIELDS + 2).to(tl.float32), 1e-12)
    lowest = tl.log2(rest / (2 * width))
    lowest = tl.where(tl.load(table + row * _FIELDS + 1) > 0, highest - _K_OCTAVES, lowest)
    lowest = tl.minimum(tl.maximum(lowest, -40.0), highest - 1.0)
    threshold = tl.exp2(highest + (lowest - highest) * ((level + 1).to(tl.float32) / (_LEVELS - 1)))
    return tl.where((level == _LEVELS - 1) | (threshold < 9.094947017729282e-13), 9.094947017729282e-13, threshold)


@triton.jit(do_not_specialize=["chunks"])
def _levels(
    logits, lines, table, tops, lows, finite, units, squares, totals, thresholds, counts, sums, parts, width, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Program (s, c): for chunk c of line s, number and weight of the tokens down to each level, [S, chunks, 16].

    If the line draws by a race, the program writes the weights of the race's parts instead, [S, parts].
    """
    line, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = _row(lines, line)
    if not _is_random(table, row):
        return
    best = _best(tops, line, chunks, CHUNKS)
    least = _least(table, row, tops, lows, finite, units, squares, line, chunks, CHUNKS)
    temperature = tl.load(table + row * _FIELDS).to(tl.float32)
    total = _total(totals, line, chunks, CHUNKS)
    likeliest = 1.0 / total
    if _is_ranked(table, row):
        threshold = _thresholds(table, row, likeliest, width)
        if chunk == 0:
            tl.store(thresholds + line * _LEVELS + tl.arange(0, _LEVELS), threshold)
        count = tl.zeros((_LEVELS,), tl.int32)
        weight = tl.zeros((_LEVELS,), tl.int64)
        for start in range(0, CHUNK, _BLOCK):
            column = chunk * CHUNK + start + tl.arange(0, _BLOCK)
            x = tl.load(logits + line * width + column, column < width, other=-_INFINITY)
            p = _exp(x, best, temperature, least) / total
            belongs = p[None, :] >= threshold[:, None]
            count += tl.sum(belongs.to(tl.int32), 1)
            weight += tl.sum(tl.where(belongs, _weight(p)[None, :], 0), 1)
        at = (line * chunks + chunk) * _LEVELS + tl.arange(0, _LEVELS)
        tl.store(counts + at, count)
        tl.store(sums + at, weight)
    else:
        lowest = tl.load(table + row * _FIELDS + 3).to(tl.float32) * likeliest
        for start in range(0, CHUNK, PART):
            column = chunk * CHUNK + start + tl.arange(0, PART)
            x = tl.load(logits + line * width + column, column < width, other=-_INFINITY)
            p = _exp(x, best, temperature, least) / total
            weights = tl.sum(_weight(tl.where(p >= lowest, p, 0.0)), 0)
            tl.store(parts + line * chunks * (CHUNK // PART) + chunk * (CHUNK // PART) + start // PART, weights)


@triton.jit
def _reached(counts, sums, line, chunks, CHUNKS: tl.constexpr):
    """Return number and weight of a line's tokens down to each level."""
    level, chunk = tl.arange(0, _LEVELS), tl.arange(0, CHUNKS)
    at = (line * chunks + chunk[:, None]) * _LEVELS + level[None, :]
    count = tl.sum(tl.load(counts + at, (chunk < chunks)[:, None], other=0), 0)
    return count, tl.sum(tl.load(sums + at, (chunk < chunks)[:, None], other=0), 0)


@triton.jit
def _at(values, index):
    """Return the element of a vector of levels."""
    return tl.sum(tl.where(tl.arange(0, _LEVELS) == index, values, 0), 0)


@triton.jit
def _first(holds):
    """Return the first level where a condition holds; the last level if it holds nowhere."""
    return tl.min(tl.where(holds, tl.arange(0, _LEVELS), _LEVELS - 1), 0)


@triton.jit
def _last_level(table, row, count, weight):
    """Return the level down to which the row's top_k tokens, or its share top_p, are included."""
    k = tl.load(table + row * _FIELDS + 1).to(tl.int64)
    one = tl.full((), _ONE, tl.int64)
    wanted = tl.maximum(_ceil_times(one, tl.load(table + row * _FIELDS + 2)), 1)  # top_p 0 keeps the likeliest token
    return _first(tl.where(k > 0, count >= k, weight >= wanted))


@triton.jit(do_not_specialize=["chunks"])
def _pick(
    logits, lines, table, tops, lows, finite, units, squares, totals, thresholds, counts, sums, ids, values, width,
    chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Program (s, c): write the tokens of chunk c of line s, down to the last level, to ids and values [S, width].

    The tokens are sorted by level, and within a level by id.
    """
    line, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = _row(lines, line)
    if not _is_random(table, row):
        return
    if not _is_ranked(table, row):
        return
    level, every = tl.arange(0, _LEVELS), tl.arange(0, CHUNKS)
    count, weight = _reached(counts, sums, line, chunks, CHUNKS)
    last = _last_level(table, row, count, weight)
    # Down to each level: the tokens of the chunks before this one, and all those of the level above.
    cells = (line * chunks + every[:, None]) * _LEVELS + level[None, :]
    before = tl.sum(tl.load(counts + cells, (every < chunk)[:, None], other=0), 0)
    above = (level > 0)[None, :]
    before -= tl.sum(tl.load(counts + cells - 1, (every < chunk)[:, None] & above, other=0), 0)
    position = before + tl.sum(tl.load(counts + cells - 1, (every < chunks)[:, None] & above, other=0), 0)
    best = _best(tops, line, chunks, CHUNKS)
    least = _least(table, row, tops, lows, finite, units, squares, line, chunks, CHUNKS)
    temperature = tl.load(table + row * _FIELDS).to(tl.float32)
    total = _total(totals, line, chunks, CHUNKS)
    threshold = tl.load(thresholds + line * _LEVELS + level)
    lowest = tl.load(thresholds + line * _LEVELS + last)
    for start in range(0, CHUNK, _BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, _BLOCK)
        x = tl.load(logits + line * width + column, column < width, other=-_INFINITY)
        p = _exp(x, best, temperature, least) / total
        belongs = p >= lowest
        if tl.max(belongs.to(tl.int32), 0) > 0:
            own = tl.sum((p[None, :] < threshold[:, None]).to(tl.int32), 0)  # the token's level
            is_own = (own[None, :] == level[:, None]) & belongs[None, :]
            places = position[:, None] + tl.cumsum(is_own.to(tl.int32), 1) - 1
            place = line * width + tl.sum(tl.where(is_own, places, 0), 0)
            tl.store(ids + place, column, belongs)
            tl.store(values + place, x, belongs)
            position += tl.sum(is_own.to(tl.int32), 1)


@triton.jit
def _keys(values, position, inside):
    """Integers in the order of the logits; -0 equals 0. Lanes outside get the smallest key."""
    value = tl.load(values + position, inside, other=0.0)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & _LAST)
    return tl.where(inside, key, -_LAST - 1).to(tl.int64)


@triton.jit
def _weights_at(values, position, inside, best, temperature, total):
    x = tl.load(values + position, inside, other=-_INFINITY)
    return _weight(tl.exp((x - best) / temperature) / total)


@triton.jit
def _extremes(values, begin, end):
    """The smallest and the largest key among listed tokens."""
    lowest = tl.full((), _LAST, tl.int64)
    highest = -lowest - 1
    for start in range(begin, end, _BLOCK):
        position = start + tl.arange(0, _BLOCK)
        inside = position < end
        key = _keys(values, position, inside)
        lowest = tl.minimum(lowest, tl.min(tl.where(inside, key, _LAST), 0))
        highest = tl.maximum(highest, tl.max(key, 0))
    return lowest, highest


@triton.jit
def _search(values, begin, end, wanted, best, temperature, total, WEIGHTS: tl.constexpr):
    """Return the largest key for which the tokens in [begin, end) with at least this key reach ``wanted``.

    ``wanted`` is a weight with WEIGHTS, else a number of tokens. If all tokens together do not reach it, the smallest
    key is returned. A key is a logit as an integer in the same order.
    """
    digit = tl.arange(0, _RADIX)
    lowest, highest = _extremes(values, begin, end)
    shift = 0
    while ((highest - lowest) >> shift) >= _RADIX:
        shift += _BITS
    key = lowest
    while shift >= 0:
        threshold = key + (digit.to(tl.int64) << shift)
        reached = tl.zeros((_RADIX,), tl.int64)
        for start in range(begin, end, _BLOCK):
            position = start + tl.arange(0, _BLOCK)
            inside = position < end
            amount = inside.to(tl.int64)
            if WEIGHTS:
                amount = _weights_at(values, position, inside, best, temperature, total)
            above = _keys(values, position, inside)[None, :] >= threshold[:, None]
            reached += tl.sum(tl.where(above, amount[None, :], 0), 1)
        digits = tl.sum(((reached >= wanted) & (digit > 0)).to(tl.int64), 0)
        key += digits << shift
        shift -= _BITS
    return key


@triton.jit
def _around(values, begin, end, key, best, temperature, total):
    """Return, for listed tokens, the weight above a key, the weight of one token with this key, and their number."""
    above = tl.zeros((), tl.int64)
    one = tl.zeros((), tl.int64)
    equal = tl.zeros((), tl.int64)
    for start in range(begin, end, _BLOCK):
        position = start + tl.arange(0, _BLOCK)
        inside = position < end
        weight = _weights_at(values, position, inside, best, temperature, total)
        found = _keys(values, position, inside)
        has = inside & (found == key)
        above += tl.sum(tl.where(inside & (found > key), weight, 0), 0)
        one = tl.maximum(one, tl.max(tl.where(has, weight, 0), 0))
        equal += tl.sum(has.to(tl.int64), 0)
    return above, one, equal


@triton.jit
def _found(values, count, weight, wanted, best, temperature, total, WEIGHTS: tl.constexpr):
    """Find the key down to which the tokens, from the largest logit on, reach ``wanted``, a weight or a number.

    Returns:
        The begin and end of the key's level in the list, the key, the weight of all tokens with larger keys, the weight
        of one token with the key, and the number of tokens with the key.
    """
    reached = weight if WEIGHTS else count.to(tl.int64)
    level = _first(reached >= wanted)
    begin, end = _at(count, level - 1), _at(count, level)
    key = _search(values, begin, end, wanted - _at(reached, level - 1), best, temperature, total, WEIGHTS)
    above, one, equal = _around(values, begin, end, key, best, temperature, total)
    return begin, end, key, above + _at(weight, level - 1), one, equal


@triton.jit
def _kept_by_min_p(values, count, weight, threshold, last, least, best, temperature, total):
    """Weight of the listed tokens whose probability is ``least`` or more."""
    level = _first((threshold < least) | (tl.arange(0, _LEVELS) == last))
    kept = _at(weight, level - 1)
    begin, end = _at(count, level - 1), _at(count, level)
    for start in range(begin, end, _BLOCK):
        position = start + tl.arange(0, _BLOCK)
        x = tl.load(values + position, position < end, other=-_INFINITY)
        p = tl.exp((x - best) / temperature) / total
        kept += tl.sum(tl.where(p >= least, _weight(p), 0), 0)
    return kept


@triton.jit
def _nth_with_key(ids, values, begin, end, key, n):
    """The id of the n-th token of [begin, end), by id and from 0, that has a key."""
    seen = tl.zeros((), tl.int64)
    token = tl.zeros((), tl.int64)
    for start in range(begin, end, _BLOCK):
        position = start + tl.arange(0, _BLOCK)
        inside = position < end
        has = (inside & (_keys(values, position, inside) == key)).to(tl.int64)
        is_nth = (has > 0) & (seen + tl.cumsum(has, 0) == n + 1)
        token += tl.sum(tl.where(is_nth, tl.load(ids + position, inside, other=0), 0).to(tl.int64), 0)
        seen += tl.sum(has, 0)
    return token


@triton.jit
def _mixed(z):
    """The output function of SplitMix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _bits(seeds, row, lines, line, index):
    """Random bits, uint64: output of the row's stream at the line's position."""
    golden = 0x9E3779B97F4A7C15
    seed = (tl.load(seeds + row * _FIELDS + 5) + index * 0).to(tl.uint64, bitcast=True)
    position = (tl.load(lines + line * 2 + 1) + 1 + index * 0).to(tl.uint64, bitcast=True)
    return _mixed(_mixed(seed + golden) + position * golden)


@triton.jit
def _noise(seeds, row, lines, line, index):
    """Exponential random numbers of a race, fp64, by index."""
    golden = 0x9E3779B97F4A7C15
    bits = _mixed(_bits(seeds, row, lines, line, index) + (index + 1).to(tl.uint64, bitcast=True) * golden)
    return -tl.log(((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16)


@triton.jit
def _winner(weights, noise, index):
    """The first index of the largest weight / noise."""
    ratio = weights.to(tl.float64) / noise
    return tl.min(tl.where(ratio == tl.max(ratio, 0), index, _LAST), 0)


@triton.jit
def _raced(
    logits, lines, seeds, parts, row, line, width, num_parts, best, temperature, total, lowest, least,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The winner of the race of all tokens of a line."""
    index = tl.arange(0, PARTS).to(tl.int64)
    weight = tl.load(parts + line * num_parts + index, index < num_parts, other=0)
    of_parts = tl.where(index * _PART < width, index + (_RACE_BLOCK + _RACE_PART), 0)
    part = _winner(weight, _noise(seeds, row, lines, line, of_parts), index)
    block = tl.arange(0, _RACE_PART).to(tl.int64)
    inner = tl.arange(0, _RACE_BLOCK).to(tl.int64)
    column = part * _PART + block[:, None] * _RACE_BLOCK + inner[None, :]
    x = tl.load(logits + line * width + column, column < width, other=-_INFINITY)
    p = _exp(x, best, temperature, least) / total
    weights = tl.sum(_weight(tl.where(p >= lowest, p, 0.0)), 1)
    chosen = _winner(weights, _noise(seeds, row, lines, line, block + _RACE_BLOCK), block)
    column = part * _PART + chosen * _RACE_BLOCK + inner
    x = tl.load(logits + line * width + column, column < width, other=-_INFINITY)
    p = _exp(x, best, temperature, least) / total
    inside = _winner(_weight(tl.where(p >= lowest, p, 0.0)), _noise(seeds, row, lines, line, inner), inner)
    return part * _PART + chosen * _RACE_BLOCK + inside


@triton.jit
def _ranked(
    ids, values, thresholds, counts, sums, table, seeds, lines, row, line, chunks, best, temperature, total,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The token of a line's draw by rank. 0 if nothing is listed."""
    count, weight = _reached(counts, sums, line, chunks, CHUNKS)
    last = _last_level(table, row, count, weight)
    threshold = tl.load(thresholds + line * _LEVELS + tl.arange(0, _LEVELS))
    least = tl.load(table + row * _FIELDS + 3).to(tl.float32) * (1.0 / total)
    kept = _kept_by_min_p(values, count, weight, threshold, last, least, best, temperature, total)
    k = tl.load(table + row * _FIELDS + 1).to(tl.int64)
    mass = tl.full((), _ONE, tl.int64)
    if k > 0:
        _, _, _, above, one, equal = _found(values, count, weight, k, best, temperature, total, False)
        mass = above + one * equal
        kept = tl.minimum(kept, mass)
    share = tl.load(table + row * _FIELDS + 2)
    if share < 1:
        wanted = tl.maximum(_ceil_times(mass, share), 1)
        _, _, _, above, one, equal = _found(values, count, weight, wanted, best, temperature, total, True)
        needed = tl.minimum((wanted - above + one - 1) // tl.maximum(one, 1), equal)
        kept = tl.minimum(kept, above + one * needed)
    u = (_bits(seeds, row, lines, line, tl.zeros((), tl.int64)) >> 11).to(tl.float64) * 1.1102230246251565e-16
    target = tl.maximum(tl.minimum((u * kept.to(tl.float64)).to(tl.int64), kept - 1), 0)
    begin, end, key, above, one, _ = _found(values, count, weight, target + 1, best, temperature, total, True)
    return _nth_with_key(ids, values, begin, end, key, (target - above) // tl.maximum(one, 1))


@triton.jit(do_not_specialize=["chunks", "num_parts"])
def _draw(
    logits, lines, table, seeds, tops, arguments, lows, finite, units, squares, totals, thresholds, counts, sums, parts,
    ids, values, tokens, width, chunks, num_parts, CHUNKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program s: the token of line s; -1 where its largest logit is not finite, or where the line pads the launch."""
    line = tl.program_id(0).to(tl.int64)
    row = _row(lines, line)
    token = tl.full((), -1, tl.int64)
    best = tl.full((), -_INFINITY, tl.float32)
    if row >= 0:
        best = _best(tops, line, chunks, CHUNKS)
    if (best > -_INFINITY) & (best < _INFINITY):
        if _is_random(table, row):
            temperature = tl.load(table + row * _FIELDS).to(tl.float32)
            total = _total(totals, line, chunks, CHUNKS)
            if _is_ranked(table, row):
                token = _ranked(
                    ids + line * width, values + line * width, thresholds, counts, sums, table, seeds, lines, row, line,
                    chunks, best, temperature, total, CHUNKS,
                )  # fmt: skip
            else:
                least = _least(table, row, tops, lows, finite, units, squares, line, chunks, CHUNKS)
                lowest = tl.load(table + row * _FIELDS + 3).to(tl.float32) * (1.0 / total)
                token = _raced(
                    logits, lines, seeds, parts, row, line, width, num_parts, best, temperature, total, lowest, least,
                    PARTS,
                )  # fmt: skip
        else:
            chunk = tl.arange(0, CHUNKS)
            at = line * chunks + chunk
            top = tl.load(tops + at, chunk < chunks, other=-_INFINITY)
            first = tl.load(arguments + at, chunk < chunks, other=0)
            token = tl.min(tl.where(top == best, first, _LAST), 0).to(tl.int64)
    tl.store(tokens + line, token)


def draw_lines(logits: Tensor, table: Tensor, lines: Tensor) -> Tensor:
    """``kernels.sampling_ops.draw_lines``: the tokens, [S] int64."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for launch in _launches(logits, table, lines, tokens):
        launch.run()
    return tokens


def _launches(logits: Tensor, table: Tensor, lines: Tensor, tokens: Tensor) -> Iterator[Launch]:
    count, width = logits.shape
    chunks = cdiv(width, CHUNK)
    part = min(CHUNK, _PART.value)
    num_parts = chunks * (CHUNK // part)
    seeds = table.view(torch.int64)
    tops, lows, totals = logits.new_empty((3, count, chunks))
    arguments, finite = lines.new_empty((2, count, chunks), dtype=torch.int32)
    units, squares = lines.new_empty((2, count, chunks))
    thresholds = logits.new_empty((count, _LEVELS.value))
    counts = lines.new_empty((count, chunks, _LEVELS.value), dtype=torch.int32)
    sums = lines.new_empty((count, chunks, _LEVELS.value))
    parts = lines.new_empty((count, num_parts))
    ids, values = lines.new_empty((count, width), dtype=torch.int32), torch.empty_like(logits)
    grid = (count, chunks, 1)
    chunked, each = {"CHUNK": CHUNK}, {"CHUNKS": power_of_two(chunks, 16)}
    spread = (tops, lows, finite, units, squares)
    numbers = (width, chunks)
    yield Launch(_stats, grid, (logits, lines, tops, arguments, lows, finite, *numbers), chunked)
    yield Launch(_deviations, grid, (logits, lines, table, tops, lows, units, squares, *numbers), {**chunked, **each})
    yield Launch(_sums, grid, (logits, lines, table, *spread, totals, *numbers), {**chunked, **each})
    args = (logits, lines, table, *spread, totals, thresholds, counts, sums)
    yield Launch(_levels, grid, (*args, parts, *numbers), {**chunked, **each, "PART": part})
    yield Launch(_pick, grid, (*args, ids, values, *numbers), {**chunked, **each}, num_warps=8)
    of_chunks = (tops, arguments, lows, finite, units, squares, totals)
    found = (thresholds, counts, sums, parts, ids, values, tokens)
    yield Launch(
        _draw,
        (count, 1, 1),
        (logits, lines, table, seeds, *of_chunks, *found, *numbers, num_parts),
        {**each, "PARTS": power_of_two(num_parts, 16)},
        num_warps=16,
    )


_NAMES = ("stats", "deviations", "sums", "levels", "pick", "draw")


def variants() -> Iterator[tuple[str, Launch]]:
    """Every compilation for vocabularies of up to 262,144 tokens whose number is a multiple of 16."""
    table, lines = meta(64, FIELDS, dtype=torch.float64), meta(32, 2, dtype=torch.int64)
    for width in (49_152, 128_256, 262_144):
        logits, tokens = meta(32, width, dtype=torch.float32), meta(32, dtype=torch.int64)
        for name, launch in zip(_NAMES, _launches(logits, table, lines, tokens), strict=True):
            yield f"sampling_{name}/{power_of_two(cdiv(width, CHUNK), 16)}chunks", launch
