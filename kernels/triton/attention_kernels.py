"""Triton kernels of attention over paged K and V, launched by ``kernels.triton.attention``.

A tile is up to BLOCK_M query vectors that read one KV head: all heads of the group for one token, then for the next
token. All kernels use one loop over the keys of a tile, block by block. Scores are exponents of base 2; when a block
has a larger score than all before it, the sums so far are rescaled.

Common arguments: q and out [T, kv_heads * group, dim]; k_cache and v_cache [num_pages, kv_heads, page_size, dim] with
page_size ``1 << page_bits``; page_table [R, table_width]; query_start [R + 1]; context_len [R]. A score is ``factor *
q.k``, or ``bound * tanh(factor * q.k)`` if CAPPED; ``factor`` and ``bound`` include the change to base 2. A token sees
only the last ``window`` keys, and of these only the keys from the last multiple of ``chunk`` on.

KV is the form of the caches. With PLAIN_KV they have the type of q. With INT8_KV and FLOAT8_KV they are bytes in the
order of ``kernels.layouts.kv_forms``; the scales of keys are applied to scores, the scales of values to weights.

In latent attention the first VALUES dimensions of a key are its value too, and are loaded once for both. ``rest`` is
the other dim - VALUES dimensions of a query, at most BLOCK_R. Results then have VALUES dimensions. With VALUES = 0 keys
and values are separate and have ``dim`` dimensions each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import tanh
from .grouped_product import E4M3_FACTOR, small_float

_NOTHING = tl.constexpr(-1e30)  # maximum of no scores: finite, so that the difference of two of them is 0
_MERGED_AT_ONCE = tl.constexpr(4)  # number of results whose loads run in parallel
_MERGED = tl.constexpr(2048)  # numbers of a result that are merged at once, for all vectors of a tile
_ROWS_AT_ONCE = tl.constexpr(128)
LEAST_KEYS = tl.constexpr(128)  # fewest keys that are worth a program
_LOG2_E = tl.constexpr(1.4426950408889634)

PLAIN_KV = tl.constexpr(0)
INT8_KV = tl.constexpr(1)
FLOAT8_KV = tl.constexpr(2)
_FLOAT8_FACTOR = tl.constexpr(E4M3_FACTOR)


@triton.jit
def _first_seen(position, window, chunk):
    """Return the first key that a token at a position sees; may be negative."""
    return tl.maximum(position - window + 1, position // chunk * chunk)


@triton.jit
def _load_keys(
    cache, at, begin, width, inside, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, KV: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """Load dimensions from ``begin`` on of keys in a cache, [BLOCK_N, BLOCK_D].

    ``at`` is the offset at which each key begins. Keys that are not ``inside``, and dimensions past ``width``, are 0.
    Numbers in E4M3 are divided by _FLOAT8_FACTOR.
    """
    d = tl.arange(0, BLOCK_D)
    pointers = cache + at[:, None] + (begin + d)[None, :]
    if MASKED:
        keys = tl.load(pointers, inside[:, None] & (d < width)[None, :], other=0)
    else:
        keys = tl.load(pointers, (d < width)[None, :], other=0)
    if KV == INT8_KV:
        keys = keys.to(tl.int8, bitcast=True).to(tl.float32).to(TYPE)
    elif KV == FLOAT8_KV:
        keys = small_float(keys, False).to(TYPE)
    return keys


@triton.jit
def _load_scales(cache, cell, page_bits, dim, inside, MASKED: tl.constexpr, KV: tl.constexpr):
    """Return the scales of the cells in a cache of bytes: [BLOCK_N] fp32, 0 for keys outside."""
    first = (cell >> page_bits) << page_bits  # first cell of the head's page
    at = (first * (dim + 4) + (dim << page_bits)) // 4 + (cell - first)
    pointers = cache.to(tl.pointer_type(tl.float32)) + at
    scales = tl.load(pointers, inside, other=0.0) if MASKED else tl.load(pointers)
    if KV == FLOAT8_KV:
        scales = scales * _FLOAT8_FACTOR
    return scales


@triton.jit
def _load_queries(q, index, dim, inside, BLOCK_D: tl.constexpr, VALUES: tl.constexpr, BLOCK_R: tl.constexpr):
    """Load query vectors of latent attention: [BLOCK_M, BLOCK_D], and their ``rest`` [BLOCK_M, BLOCK_R]."""
    d = tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_R)
    source = q + index[:, None] * dim
    first = tl.load(source + d[None, :], inside[:, None] & (d < VALUES)[None, :], other=0.0)
    rest = tl.load(source + (VALUES + r)[None, :], inside[:, None] & (r < dim - VALUES)[None, :], other=0.0)
    return first, rest


@triton.jit
def _attend_block(
    q, rest, values, total, largest, k_cache, v_cache, pages, kv_head, kv_heads, page_bits, dim, start, end, position,
    seen_from, factor, bound, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, VALUES: tl.constexpr, BLOCK_R: tl.constexpr, KV: tl.constexpr, low, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Process one block of keys from ``start``: return new sums of values and weights, and new largest scores."""
    n = start + tl.arange(0, BLOCK_N)
    inside = n < end
    if ALIGNED:
        inside &= n >= low
    page = tl.load(pages + (n >> page_bits), inside, other=0) if MASKED else tl.load(pages + (n >> page_bits))
    cell = ((page.to(tl.int64) * kv_heads + kv_head) << page_bits) + (n & ((1 << page_bits) - 1))
    at = cell * dim
    if KV != PLAIN_KV:
        at += ((cell >> page_bits) << page_bits) * 4  # skip the scales of the preceding pages
    if VALUES:
        k = _load_keys(k_cache, at, 0, VALUES, inside, BLOCK_D, MASKED, KV, q.dtype)
        behind = _load_keys(k_cache, at, VALUES, dim - VALUES, inside, BLOCK_R, MASKED, KV, q.dtype)
        scores = tl.dot(rest, tl.trans(behind), input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION) * factor
    else:
        k = _load_keys(k_cache, at, 0, dim, inside, BLOCK_D, MASKED, KV, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
    if KV != PLAIN_KV:
        scores *= _load_scales(k_cache, cell, page_bits, dim, inside, MASKED, KV)[None, :]
    if CAPPED:
        scores = bound * tanh(scores)
    if MASKED:
        seen = (n[None, :] <= position[:, None]) & (n[None, :] >= seen_from[:, None]) & inside[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    larger = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - larger[:, None])
    shrink = tl.exp2(largest - larger)
    v = k
    if not VALUES:
        v = _load_keys(v_cache, at, 0, dim, inside, BLOCK_D, MASKED, KV, q.dtype)
    scaled = weights
    if KV != PLAIN_KV:
        scaled = weights * _load_scales(v_cache, cell, page_bits, dim, inside, MASKED, KV)[None, :]
    values = tl.dot(scaled.to(v.dtype), v, values * shrink[:, None], input_precision=PRECISION)
    return values, total * shrink + tl.sum(weights, 1), larger


@triton.jit
def _attend_keys(
    q, rest, k_cache, v_cache, pages, kv_head, kv_heads, page_bits, dim, begin, end, first, unseen, position, seen_from,
    factor, bound, largest, total, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, UNMASKED: tl.constexpr, VALUES: tl.constexpr, BLOCK_R: tl.constexpr,
    KV: tl.constexpr, ALIGNED: tl.constexpr = False,
):  # fmt: skip
    """Attend with a tile of queries to the keys [begin, end). Returns normalised values and log2 of the sum of weights.

    ``largest`` and ``total`` are the values before the first key: the largest score of the sinks, which have no value,
    and the sum of their weights relative to it. ``first`` is the smallest position of the tile's queries; keys from
    ``unseen`` on are in the windows of all queries. With UNMASKED, the blocks that all queries see whole are computed
    first, without a mask, and then the blocks at the beginning of the windows and at the diagonal. With ALIGNED, blocks
    begin at multiples of their size, and keys before ``begin`` are masked.
    """
    low = begin
    if ALIGNED:
        begin = begin // BLOCK_N * BLOCK_N
    values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    blocks = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)
    lead = blocks
    skipped = 0
    if UNMASKED:
        lead = tl.minimum(tl.cdiv(tl.maximum(unseen - begin, 0), BLOCK_N), blocks)
        skipped = tl.maximum(tl.maximum(tl.minimum(first + 1, end) - begin, 0) // BLOCK_N - lead, 0)
        for i in range(lead, lead + skipped):
            values, total, largest = _attend_block(
                q, rest, values, total, largest, k_cache, v_cache, pages, kv_head, kv_heads, page_bits, dim,
                begin + i * BLOCK_N, end, position, seen_from, factor, bound, BLOCK_D, BLOCK_N, CAPPED, False,
                PRECISION, VALUES, BLOCK_R, KV, low, False,
            )  # fmt: skip
    for i in range(blocks - skipped):
        block = tl.where(i < lead, i, i + skipped)
        values, total, largest = _attend_block(
            q, rest, values, total, largest, k_cache, v_cache, pages, kv_head, kv_heads, page_bits, dim,
            begin + block * BLOCK_N, end, position, seen_from, factor, bound, BLOCK_D, BLOCK_N, CAPPED, True, PRECISION,
            VALUES, BLOCK_R, KV, low, ALIGNED,
        )  # fmt: skip
    some = total != 0.0
    values = values / tl.where(some, total, 1.0)[:, None]
    return values, tl.where(some, largest + tl.log2(tl.where(some, total, 1.0)), _NOTHING)


@triton.jit
def _sinks(sinks, head, is_counted, BLOCK_M: tl.constexpr, SINKS: tl.constexpr):
    """Return largest score and sum of weights of some heads' sinks if ``is_counted``, else of nothing."""
    largest = tl.full([BLOCK_M], _NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        largest = tl.where(is_counted, tl.load(sinks + head, is_counted, other=0.0) * _LOG2_E, _NOTHING)
        total = tl.where(is_counted, 1.0, 0.0)
    return largest, total


@triton.jit
def _row_of_tile(query_start, tile, rows, group, BLOCK_M: tl.constexpr):
    """Return the last row whose tiles begin at or before ``tile``.

    The tiles of row r begin at ``query_start[r] * group // BLOCK_M + r``. The ``+ r`` leaves room for an incomplete
    tile in each row.
    """
    low = 0
    high = rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle) * group // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(do_not_specialize=["rows", "group", "kv_heads", "page_bits", "table_width", "window", "chunk"])
def extend(
    q, k_cache, v_cache, page_table, query_start, context_len, sinks, out, rows, group, kv_heads, page_bits, dim,
    table_width, window, chunk, factor, bound, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr, VALUES: tl.constexpr, BLOCK_R: tl.constexpr,
    KV: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Program (t, h): a tile of a row with more than one token, for KV head h. With EVERY also of a row with one token.

    With EVERY, a token gets the same bits whichever tokens of its row are in the tile: blocks begin at multiples of
    their size, and all blocks are masked, because masked keys do not change a sum.

    The last tiles of a row see the most keys, so they start first. Then the programs that end last are short.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _row_of_tile(query_start, tile, rows, group, BLOCK_M)
    start = tl.load(query_start + row)
    tokens = tl.load(query_start + row + 1) - start
    # Offset of the tile's first vector within its row.
    offset = (tile - (start * group // BLOCK_M + row)) * BLOCK_M
    if ((tokens <= 1) & (not EVERY)) | (offset >= tokens * group):
        return
    vector = offset + tl.arange(0, BLOCK_M)
    inside = vector < tokens * group
    before = tl.load(context_len + row) - tokens
    first = before + offset // group
    last = before + tl.minimum((offset + BLOCK_M - 1) // group, tokens - 1)
    position = tl.minimum(before + vector // group, last)
    d = tl.arange(0, BLOCK_D)
    index = ((start + vector // group).to(tl.int64) * kv_heads + kv_head) * group + vector % group
    width = dim
    if VALUES:
        width = VALUES
        own, rest = _load_queries(q, index, dim, inside, BLOCK_D, VALUES, BLOCK_R)
    address = index[:, None] * width + d[None, :]
    mask = inside[:, None] & (d < width)[None, :]
    if not VALUES:
        own = tl.load(q + address, mask, other=0.0)
        rest = own
    largest, total = _sinks(sinks, kv_head * group + vector % group, inside, BLOCK_M, SINKS)
    begin = tl.maximum(_first_seen(first, window, chunk), 0)
    unseen, seen_from = _first_seen(last, window, chunk), _first_seen(position, window, chunk)
    values, _ = _attend_keys(
        own, rest, k_cache, v_cache, page_table + row.to(tl.int64) * table_width, kv_head, kv_heads, page_bits, dim,
        begin, last + 1, first, unseen, position, seen_from, factor, bound, largest, total, BLOCK_D, BLOCK_M, BLOCK_N,
        CAPPED, PRECISION, not EVERY, VALUES, BLOCK_R, KV, EVERY,
    )  # fmt: skip
    tl.store(out + address, values.to(out.dtype.element_ty), mask)


@triton.jit
def _keys_of_all(query_start, context_len, shared_end, rows, window, chunk, SHARED: tl.constexpr):
    """Return the number of keys that all rows of one token see, without the keys that rows share."""
    keys = 0
    for first in range(0, rows, _ROWS_AT_ONCE):
        row = first + tl.arange(0, _ROWS_AT_ONCE)
        inside = row < rows
        tokens = tl.load(query_start + row + 1, inside, other=0) - tl.load(query_start + row, inside, other=0)
        last = tl.load(context_len + row, inside, other=0) - 1
        begin = tl.maximum(_first_seen(last, window, chunk), 0)
        if SHARED:
            begin = tl.maximum(begin, tl.load(shared_end + row, inside, other=0))
        keys += tl.sum(tl.where(inside & (tokens == 1), last + 1 - begin, 0), 0)
    return keys


@triton.jit
def _count_parts(keys, of_all, wanted, splits):
    """Return the number of parts for a row's own keys: its share of the ``wanted`` parts of all, at most ``splits``.

    It is computed with integers, so that programs for shared keys get the same number as programs for the row's own.
    """
    share = (keys.to(tl.int64) * wanted // tl.maximum(of_all, 1)).to(tl.int32)
    return tl.maximum(tl.minimum(tl.minimum(share, tl.cdiv(keys, LEAST_KEYS)), splits), 1)


@triton.jit
def _weight_of(partial_weight, first, number, own, count, is_last, heads, splits):
    """Return the weight of result ``number`` of each vector, if it has that many results, and the result's index."""
    index = first + tl.where(number < own, number, splits + number - own) * heads
    return tl.load(partial_weight + index, is_last & (number < count), other=_NOTHING), index


@triton.jit
def _merge_if_last(
    out, partial_values, partial_weight, arrived, row, head, token, inside, own, more, heads, width, splits, slots,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Count one partial result for each query vector of head ``head`` in row ``row``; after the last one, merge all.

    A vector has ``own`` results over its row's own keys, from slot 0 on, and ``more`` results over keys shared with
    other rows, from slot ``splits`` on. Results are merged in this order, whichever program comes last. Then the
    counter is reset to 0.
    """
    tl.debug_barrier()  # all threads' stores must be visible before they are counted
    counter = arrived + row * heads + head
    count = own + more
    is_last = inside & (tl.atomic_add(counter, 1, inside, sem="acq_rel", scope="gpu") + 1 == count)
    most = tl.max(tl.where(is_last, count, 0), 0)
    if most > 0:
        tl.debug_barrier()  # all threads must have read the counts before any reads results
        tl.store(counter, 0, is_last)
        first = row * slots * heads + head
        total = tl.zeros([BLOCK_M], tl.float32)
        largest = tl.full([BLOCK_M], _NOTHING, tl.float32)
        for begin in range(0, most, _MERGED_AT_ONCE):
            for i in tl.static_range(_MERGED_AT_ONCE):
                weight, _ = _weight_of(partial_weight, first, begin + i, own, count, is_last, heads, splits)
                larger = tl.maximum(largest, weight)
                total = total * tl.exp2(largest - larger) + tl.exp2(weight - larger)
                largest = larger
        # A few dimensions are merged at a time: several results of a whole tile do not fit in the registers.
        DIMS: tl.constexpr = BLOCK_D if BLOCK_D * BLOCK_M <= _MERGED else _MERGED // BLOCK_M
        for start in range(0, width, DIMS):
            d = start + tl.arange(0, DIMS)
            values = tl.zeros([BLOCK_M, DIMS], tl.float32)
            for begin in range(0, most, _MERGED_AT_ONCE):
                for i in tl.static_range(_MERGED_AT_ONCE):
                    weight, index = _weight_of(partial_weight, first, begin + i, own, count, is_last, heads, splits)
                    # The condition also holds for NaN, which must propagate; results without weight have no value.
                    there = (weight != _NOTHING)[:, None] & (d < width)[None, :]
                    part = tl.load(partial_values + index[:, None] * width + d[None, :], there, other=0.0)
                    values += part * tl.exp2(weight - largest)[:, None]
            target = out + (token * heads + head)[:, None] * width + d[None, :]
            merged = values / tl.where(is_last, total, 1.0)[:, None]
            tl.store(target, merged.to(out.dtype.element_ty), is_last[:, None] & (d < width)[None, :])


@triton.jit
def _attend_prefix(
    program, tiles, q, k_cache, v_cache, page_table, query_start, context_len, items, members, shared_end, shared_count,
    out, partial_values, partial_weight, arrived, rows, group, kv_heads, page_bits, dim, table_width, window, chunk,
    factor, bound, wanted, splits, slots, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, VALUES: tl.constexpr, BLOCK_R: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of an item for a tile of the heads of the item's members. Keys are read once per tile."""
    item = items + program // tiles * 4
    kv_head = tl.program_id(1)
    count = tl.load(item + 3) * group
    if program % tiles * BLOCK_M < count:
        begin = tl.load(item)
        end = tl.load(item + 1)
        member = members + tl.load(item + 2) * 2
        vector = program % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = vector < count
        row = tl.load(member + vector // group * 2, inside, other=0).to(tl.int64)
        slot = splits + tl.load(member + vector // group * 2 + 1, inside, other=0)
        token = tl.load(query_start + row, inside, other=0).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        head = kv_head * group + vector % group
        index = token * kv_heads * group + head
        width = dim
        if VALUES:
            width = VALUES
            queries, rest = _load_queries(q, index, dim, inside, BLOCK_D, VALUES, BLOCK_R)
        mask = inside[:, None] & (d < width)[None, :]
        if not VALUES:
            queries = tl.load(q + index[:, None] * dim + d[None, :], mask, other=0.0)
            rest = queries
        seen_from = tl.full([BLOCK_M], 0, tl.int32)
        position = seen_from + (end - 1)
        nothing, zero = _sinks(q, vector, inside, BLOCK_M, False)  # the sinks are counted with a row's own keys
        values, weight = _attend_keys(
            queries, rest, k_cache, v_cache, page_table + tl.load(member).to(tl.int64) * table_width, kv_head, kv_heads,
            page_bits, dim, begin, end, end - 1, 0, position, seen_from, factor, bound, nothing, zero, BLOCK_D, BLOCK_M,
            BLOCK_N, CAPPED, PRECISION, False, VALUES, BLOCK_R, KV,
        )  # fmt: skip
        target = ((row * slots + slot) * kv_heads) * group + head
        tl.store(partial_weight + target, weight, inside)
        tl.store(partial_values + target[:, None] * width + d[None, :], values, mask)
        own = tl.full([BLOCK_M], 1, tl.int32)
        if splits > 1:
            of_all = _keys_of_all(query_start, context_len, shared_end, rows, window, chunk, True)
            keys = tl.load(context_len + row, inside, other=0) - tl.load(shared_end + row, inside, other=0)
            own = _count_parts(keys, of_all, wanted, splits)
        more = tl.load(shared_count + row, inside, other=0)
        _merge_if_last(
            out, partial_values, partial_weight, arrived, row, head, token, inside, own, more, kv_heads * group, width,
            splits, slots, BLOCK_D, BLOCK_M,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "rows", "group", "kv_heads", "page_bits", "table_width", "window", "chunk", "row_tiles", "wanted", "splits",
        "slots", "prefix_tiles", "prefix_programs", "prefix_layers",
    ]
)  # fmt: skip
def decode(
    q, k_cache, v_cache, page_table, query_start, context_len, sinks, items, members, shared_end, shared_count, out,
    partial_values, partial_weight, arrived, rows, group, kv_heads, page_bits, dim, table_width, window, chunk, factor,
    bound, row_tiles, wanted, splits, slots, prefix_tiles, prefix_programs, prefix_layers, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PREFIX_M: tl.constexpr, PREFIX_N: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, PRECISION: tl.constexpr, VALUES: tl.constexpr, BLOCK_R: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Program (t, h, s): for KV head h, keys that rows share (s < prefix_layers) or part ``s - prefix_layers`` of own.

    A program for a row's own keys attends with a tile of the heads that read KV head h; rows without exactly one token
    are skipped. A row's own keys are split into its share of the ``wanted`` parts of all keys, at most ``splits``. If a
    row has only one result, it is final. Otherwise each partial result is stored in a slot of the row and counted in
    arrived [rows, heads], which is all 0 before and after the launch. The program that stores the last partial result
    of a head merges all of them. Without PREFIX_M no keys are shared.

    There are ``prefix_tiles`` programs for the shared keys of each item, ``prefix_programs`` in all. They are numbered
    consecutively through the first ``prefix_layers`` values of s. Their results for a member are stored in the slots of
    its row from ``splits`` on. An item without members is skipped.
    """
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if PREFIX_M:
        if split < prefix_layers:
            program = split * tl.num_programs(0) + tl.program_id(0)
            if program < prefix_programs:
                _attend_prefix(
                    program, prefix_tiles, q, k_cache, v_cache, page_table, query_start, context_len, items, members,
                    shared_end, shared_count, out, partial_values, partial_weight, arrived, rows, group, kv_heads,
                    page_bits, dim, table_width, window, chunk, factor, bound, wanted, splits, slots, BLOCK_D, PREFIX_M,
                    PREFIX_N, CAPPED, PRECISION, VALUES, BLOCK_R, KV,
                )  # fmt: skip
            return
        split -= prefix_layers
    row = tl.program_id(0) // row_tiles
    token = tl.load(query_start + row)
    if tl.load(query_start + row + 1) - token != 1:
        return
    head = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)  # within the group
    last = tl.load(context_len + row) - 1
    seen_from = tl.maximum(_first_seen(last, window, chunk), 0)
    begin = seen_from
    more = 0
    if PREFIX_M:
        begin = tl.maximum(tl.load(shared_end + row), begin)
        more = tl.load(shared_count + row)
    count = 1
    if splits > 1:
        of_all = _keys_of_all(query_start, context_len, shared_end, rows, window, chunk, PREFIX_M > 0)
        count = _count_parts(last + 1 - begin, of_all, wanted, splits)
    if split >= count:
        return
    part = tl.cdiv(tl.cdiv(last + 1 - begin, count), BLOCK_N) * BLOCK_N
    begin += split * part
    end = tl.minimum(begin + part, last + 1)
    d = tl.arange(0, BLOCK_D)
    index = (token.to(tl.int64) * kv_heads + kv_head) * group + head
    width = dim
    if VALUES:
        width = VALUES
        own, rest = _load_queries(q, index, dim, head < group, BLOCK_D, VALUES, BLOCK_R)
    address = index[:, None] * width + d[None, :]
    mask = (head < group)[:, None] & (d < width)[None, :]
    if not VALUES:
        own = tl.load(q + address, mask, other=0.0)
        rest = own
    largest, total = _sinks(sinks, kv_head * group + head, (head < group) & (split == 0), BLOCK_M, SINKS)
    values, weight = _attend_keys(
        own, rest, k_cache, v_cache, page_table + row.to(tl.int64) * table_width, kv_head, kv_heads, page_bits, dim,
        begin, end, last, seen_from, tl.full([BLOCK_M], last, tl.int32), tl.full([BLOCK_M], seen_from, tl.int32),
        factor, bound, largest, total, BLOCK_D, BLOCK_M, BLOCK_N, CAPPED, PRECISION, False, VALUES, BLOCK_R, KV,
    )  # fmt: skip
    if count + more == 1:
        tl.store(out + address, values.to(out.dtype.element_ty), mask)
    else:
        wide_row = row.to(tl.int64)
        slot = ((wide_row * slots + split) * kv_heads + kv_head) * group + head
        tl.store(partial_weight + slot, weight, head < group)
        tl.store(partial_values + slot[:, None] * width + d[None, :], values, mask & (weight != _NOTHING)[:, None])
        _merge_if_last(
            out, partial_values, partial_weight, arrived, wide_row, kv_head * group + head, token.to(tl.int64),
            head < group, count, more, kv_heads * group, width, splits, slots, BLOCK_D, BLOCK_M,
        )  # fmt: skip
