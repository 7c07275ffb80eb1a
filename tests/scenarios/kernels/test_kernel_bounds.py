"""No call reads or writes outside its tensors, whatever its indices say."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.kernels.guarded_memory import GuardedMemory
from support.kernels.ragged_batches import ragged_batch

from rootgraft.kernels import memory, ops
from rootgraft.kernels.layouts import int8_kv_layout

pytestmark = pytest.mark.usefixtures("kernels")

ROOT = Path(__file__).parents[3]


def spoil(batch, name: str, index, value: int):
    getattr(batch, name)[index] = value
    return batch


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("page_table", (0, 1), 1000),
        ("page_table", (0, 0), -1),
        ("context_len", 0, 33),
        ("context_len", 0, 1),
        ("context_len", 1, -5),
        ("query_start", 0, 1),
        ("query_start", 1, 9),
        ("query_start", 2, 7),
    ],
)
def test_attention_refuses(name, index, value):
    batch = spoil(ragged_batch([(2, 30), (1, 20)]), name, index, value)
    with pytest.raises(IndexError, match="lead outside"):
        ops.attention(*batch.args, ops.AttentionParams(scale=0.1))


def test_attention_refuses_tensors_that_do_not_fit():
    batch = ragged_batch([(2, 30), (1, 20)])
    params = ops.AttentionParams(scale=0.1)
    with pytest.raises(ValueError, match=r"page_table must be a contiguous torch.int32 CPU tensor of shape \[2, 2\]"):
        ops.attention(*replace(batch, page_table=batch.page_table.long()).args, params)
    with pytest.raises(ValueError, match="context_len"):
        ops.attention(*replace(batch, context_len=batch.context_len[:1]).args, params)
    with pytest.raises(ValueError, match="do not fit"):
        ops.attention(*replace(batch, q=batch.q[:, :8].contiguous()).args, params)


@pytest.mark.parametrize(("name", "index", "value"), [("page_table", (0, 1), 1000), ("context_len", 0, 33)])
def test_attention_over_8_bits_refuses(name, index, value):
    batch = spoil(ragged_batch([(2, 30), (1, 20)]).in_int8(), name, index, value)
    with pytest.raises(IndexError, match="lead outside"):
        ops.attention(*batch.args, ops.AttentionParams(scale=0.1))


def test_pages_of_8_bits_must_hold_whole_panels():
    caches = torch.zeros(2, 5, 1, 8, 16 + 4, dtype=int8_kv_layout.DTYPE)
    where = torch.tensor([0])
    with pytest.raises(ValueError, match="a multiple of 16 cells: 8"):
        ops.rope_store_kv(torch.ones(1, 48), where, where, *caches, ops.RopeParams(1, 1))


@pytest.mark.parametrize(
    ("positions", "loc"), [([0, 10], [0, 1]), ([-1, 0], [0, 1]), ([0, 1], [0, 80]), ([0, 1], [-1, 0])]
)
@pytest.mark.parametrize("tables", [{"cos_sin": torch.ones(10, 16)}, {"query_scale": torch.ones(10)}], ids=list)
def test_rope_store_kv_refuses(positions, loc, tables):
    caches = torch.zeros(2, 5, 1, 16, 16)
    with pytest.raises(IndexError, match="out of range: the cache has 80 cells"):
        ops.rope_store_kv(
            torch.ones(2, 48),
            torch.tensor(positions),
            torch.tensor(loc),
            *caches,
            ops.RopeParams(1, 1, **tables),
        )
    assert not caches.any()


@pytest.mark.parametrize(
    "changes",
    [
        {"table": torch.ones(10, 32)},
        {"table": torch.ones(10, 7)},
        {"norm": torch.ones(8)},
        {"table": torch.ones(10, 16), "scale": torch.ones(9)},
        {"scale": torch.ones(9, 1)},
    ],
)
def test_rope_store_kv_refuses_tensors_that_do_not_fit(changes):
    table, norm, scale = changes.get("table"), changes.get("norm"), changes.get("scale")
    where = torch.tensor([0])
    with pytest.raises(ValueError, match=r"cos_sin has|a head norm must be|query_scale must be"):
        ops.rope_store_kv(
            torch.ones(1, 48),
            where,
            where,
            *torch.zeros(2, 5, 1, 16, 16),
            ops.RopeParams(1, 1, table, norm, query_scale=scale),
        )


def test_linear_refuses_what_does_not_fit():
    layer = ops.pack_linear(torch.zeros(4, 6))
    with pytest.raises(ValueError, match=r"the layer takes torch.float32 \[T, 6\]"):
        ops.linear(torch.zeros(2, 5), layer)
    with pytest.raises(ValueError, match=r"torch\.bfloat16"):
        ops.linear(torch.zeros(2, 6, dtype=torch.bfloat16), layer)


@pytest.mark.parametrize("side", ["start", "end"])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_no_access_outside(side, threads):
    command = [sys.executable, "-m", "support.kernels.guarded_memory", side, threads]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("at_end", [False, True])
def test_guarded_memory_ends_where_it_says(at_end):
    """Else no access outside would be seen."""
    tensor = GuardedMemory(at_end=at_end).empty((3, 5), torch.bfloat16)
    for place, is_inside in ((0, True), (29, True), (30 if at_end else -1, False)):
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            ctypes.memset(tensor.data_ptr() + place, 0, 1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == (0 if is_inside else signal.SIGSEGV)


def test_places_beyond_32_bits():
    """Of cells of KV, in memory that is committed only where it is written."""
    qkv, tokens = torch.randn(40, 8 * 128).bfloat16(), torch.arange(40)
    for width, kind in ((128, torch.bfloat16), (128 + int8_kv_layout.SCALE_BYTES, int8_kv_layout.DTYPE)):
        found = []
        for num_pages in (8, (1 << 31) // (2 * 16 * width) + 9):
            k, v = (memory.lazy_zeros((num_pages, 2, 16, width), kind) for _ in range(2))
            pages = torch.tensor([[num_pages - 3, num_pages - 1, num_pages - 6]], dtype=torch.int32)
            loc = (pages[0, tokens // 16] * 16 + tokens % 16).long()
            q = ops.rope_store_kv(qkv, tokens, loc, k, v, ops.RopeParams(4, 2))
            memory.copy_pages(k[None], v[None], [num_pages - 3], [num_pages - 2], [16])
            pages[0, 0] += 1
            for first in (0, 39):
                ends = (torch.tensor(each, dtype=torch.int32) for each in ([0, 40 - first], [40]))
                batch = ops.PagedBatch(pages, *ends, 40 - first, 40)
                found.append(ops.attention(q[first:], k, v, batch, ops.AttentionParams(0.1)))
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
