"""Rows whose pages begin alike read them together: what is found on the host, and what the GPU's kernels make of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.ragged_batches import assert_close, ragged_batch
from support.kernels.triton_interpreter import shuffled_programs

from rootgraft.kernels import ops
from rootgraft.kernels.ops import SharedPrefixes
from rootgraft.kernels.triton import attention, shared_prefixes

CPU = torch.device("cpu")
PAGE = 16


@pytest.fixture
def low_gate(monkeypatch):
    monkeypatch.setattr(shared_prefixes, "LEAST_SHARERS", 2)
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", PAGE)
    monkeypatch.setattr(shared_prefixes, "LEAST_READS", 0)
    monkeypatch.setattr(shared_prefixes, "ITEM_KEYS", 3 * PAGE)


def find(lines: list[list[int]], contexts: list[int], queries: list[int] | None = None) -> SharedPrefixes | None:
    table = np.zeros((len(lines), max(map(len, lines))), np.int32)
    for line, pages in zip(table, lines, strict=True):
        line[: len(pages)] = pages
    lengths = np.array(queries or [1] * len(lines), np.int32)
    return shared_prefixes.find_shared_prefixes(table, lengths, np.array(contexts, np.int32), PAGE)


def readers(shared: SharedPrefixes) -> dict[tuple[int, int], set[int]]:
    """Which rows read which keys together."""
    result = {}
    for begin, end, first, count in shared.items.tolist():
        result[begin, end] = {row for row, _ in shared.members[first : first + count].tolist()}
    return result


@pytest.mark.usefixtures("low_gate")
def test_a_tree_of_rows_is_found_level_by_level():
    lines = [[1, 2, 3, 9], [1, 2, 3, 4], [1, 5, 6], [7, 8], [1, 5, 7]]
    shared = find(lines, [60, 60, 40, 20, 40])
    assert readers(shared) == {(0, 16): {0, 1, 2, 4}, (16, 48): {0, 1}, (16, 32): {2, 4}}
    assert shared.end.tolist() == [48, 48, 32, 0, 32]
    assert shared.count.tolist() == [2, 2, 2, 0, 2]
    assert (shared.most_members, shared.most_results) == (4, 2)


@pytest.mark.usefixtures("low_gate")
def test_a_row_keeps_its_last_token_for_itself():
    shared = find([[1, 2], [1, 2]], [32, 32])
    assert readers(shared) == {(0, 16): {0, 1}}
    assert find([[1], [1]], [16, 16]) is None


@pytest.mark.usefixtures("low_gate")
def test_long_prefixes_are_cut_into_items():
    shared = find([list(range(9))] * 2, [140, 140])
    assert [item[:2] for item in shared.items.tolist()] == [[0, 48], [48, 96], [96, 128]]
    assert shared.members.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [0, 2], [1, 2]]


@pytest.mark.usefixtures("low_gate")
@settings(max_examples=60, deadline=None)
@given(pages=st.integers(2, 900), rows=st.integers(2, 9), results=st.integers(0, 5), items=st.integers(1, 6))
def test_every_prefix_fits_a_captured_pass(pages, rows, results, items):
    """Its items grow until it does; where none may be large enough, rows read alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefixes, "MOST_RESULTS", results)
        patch.setattr(shared_prefixes, "MOST_ITEMS", items)
        shared = find([list(range(pages))] * rows, [pages * PAGE] * rows)
        assert (shared is None) == (results == 0)
        if shared is not None:
            assert shared_prefixes.StaticSharedPrefixes(rows, CPU).holds(shared)
            spans = sorted(readers(shared))
            assert spans[0][0] == 0 and spans[-1][1] == (pages - 1) * PAGE, "all but the page of the last token"
            assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))


@pytest.mark.usefixtures("low_gate")
def test_rows_of_several_tokens_take_no_part():
    assert find([[1, 2]] * 3, [20] * 3, [1, 4, 1]).members[:, 0].tolist() == [0, 2]
    assert find([[1, 2]] * 2, [20] * 2, [1, 4]) is None


@pytest.mark.usefixtures("low_gate")
def test_equal_pages_after_different_ones_are_no_shared_prefix():
    assert find([[1, 2, 3], [4, 2, 3]], [40, 40]) is None


def test_the_gate_wants_many_rows_and_long_prefixes():
    pages = list(range(64))
    assert find([pages] * 32, [1023] * 32) is None
    assert find([[*pages, 1]] * 31, [1025] * 31) is None
    assert find([[*pages, 1]] * 32, [1025] * 32) is not None
    assert shared_prefixes.pays(8, 4096)
    assert not shared_prefixes.pays(7, 1 << 17)
    assert not shared_prefixes.pays(64, 1023)


def test_a_short_node_is_joined_to_its_children(monkeypatch):
    monkeypatch.setattr(shared_prefixes, "LEAST_SHARERS", 2)
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 3 * PAGE)
    monkeypatch.setattr(shared_prefixes, "LEAST_READS", 0)
    shared = find([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6]], [60, 60, 30])
    assert readers(shared) == {(0, 48): {0, 1}}


def test_a_cpu_is_told_of_no_prefixes():
    table, ones = np.zeros((9, 70), np.int32), np.ones(9, np.int32)
    assert ops.find_shared_prefixes(table, ones, ones * 1100, PAGE, CPU) is None


@pytest.mark.usefixtures("interpreted", "low_gate")
@settings(max_examples=12, deadline=None)
@given(
    common=st.lists(st.integers(0, 5), min_size=2, max_size=6),
    more=st.lists(st.integers(1, 40), min_size=6, max_size=6),
    heads=st.sampled_from([(4, 2), (3, 1), (6, 1)]),
    soft_cap=st.sampled_from([None, 3.0]),
    window=st.sampled_from([None, None, 60]),
    chunk=st.sampled_from([None, None, 50]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    long_row=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_shared_prefixes_change_no_result(common, more, heads, soft_cap, window, chunk, dtype, long_row, seed):
    """Row i shares its first ``common[i]`` pages with the row before it."""
    contexts = [16 * pages + rest for pages, rest in zip(common, more, strict=False)]
    queries = [min(5, contexts[0]) if long_row else 1] + [1] * (len(common) - 1)
    shapes = list(zip(queries, contexts, strict=True))
    batch = ragged_batch(shapes, heads=heads[0], kv_heads=heads[1], dtype=dtype, seed=seed)
    for row, pages in enumerate(common[1:], 1):
        whole = min(pages, contexts[row - 1] // PAGE)
        batch.page_table[row, :whole] = batch.page_table[row - 1, :whole]
    lengths = batch.query_start.diff().numpy()
    shared = ops.find_shared_prefixes(batch.page_table.numpy(), lengths, batch.context_len.numpy(), PAGE, CPU)
    options = {"scale": 0.2, "soft_cap": soft_cap, "window": window, "chunk": chunk}
    assert_close(
        ops.attention(*replace(batch, shared=shared).args, ops.AttentionParams(**options)), batch.expected(**options)
    )


@pytest.mark.usefixtures("interpreted", "low_gate")
def test_more_sharers_than_a_tile_and_items_without_members():
    batch = ragged_batch([(1, 40)] * 11, heads=6, kv_heads=1, dtype=torch.float32)
    batch.page_table[:] = batch.page_table[0]
    shared = ops.find_shared_prefixes(
        batch.page_table.numpy(), np.ones(11, np.int32), batch.context_len.numpy(), PAGE, CPU
    )
    assert shared.most_members == 11
    padded = SharedPrefixes(
        torch.cat([shared.items, torch.zeros(3, 4, dtype=torch.int32)]),
        torch.cat([shared.members, torch.zeros(5, 2, dtype=torch.int32)]),
        shared.end,
        shared.count,
        most_members=20,
        most_results=4,
    )
    for prefixes in (shared, padded):
        sharing = replace(batch, shared=prefixes)
        assert_close(ops.attention(*sharing.args, ops.AttentionParams(scale=0.2)), batch.expected(scale=0.2))


@pytest.mark.usefixtures("interpreted", "low_gate")
@pytest.mark.parametrize("seed", range(2))
def test_programs_of_shared_and_own_keys_run_in_any_order(seed, monkeypatch):
    """Beside a row of several tokens and one that pads the batch; bits and counters do not depend on the order."""
    monkeypatch.setattr(attention, "num_sms", lambda _: 16)
    sinks = torch.linspace(-1, 2, 6)
    batch = ragged_batch([(1, 300), (3, 60), (0, 1), (1, 500), (1, 90)], heads=6, kv_heads=2, dtype=torch.float32)
    batch.page_table[3:, :5] = batch.page_table[0, :5]
    lengths = batch.query_start.diff().numpy()
    shared = ops.find_shared_prefixes(batch.page_table.numpy(), lengths, batch.context_len.numpy(), PAGE, CPU)
    assert shared.count.tolist() == [2, 0, 0, 2, 2]
    sharing = replace(batch, shared=shared)
    params = ops.AttentionParams(scale=0.2, sinks=sinks)
    expected = ops.attention(*sharing.args, params)
    assert_close(expected, batch.expected(scale=0.2, sinks=sinks))
    with shuffled_programs(seed):
        assert torch.equal(ops.attention(*sharing.args, params), expected)
    assert not attention._arrivals(CPU, 32, 0).any()
