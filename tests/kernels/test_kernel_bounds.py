"""No call reads or writes outside its tensors, whatever its indices say."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.kernels.ragged_batches import ragged_batch

from rootgraft.kernels import ops
from rootgraft.kernels.layouts import int8_kv_layout

pytestmark = pytest.mark.usefixtures("kernels")

ROOT = Path(__file__).parents[2]


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


GUARDED = '''
"""Every tensor ends (or starts) where unmapped memory starts (or ends): a step outside ends the process."""
import ctypes, mmap, sys
import torch
from rootgraft.kernels import ops

AT_END = sys.argv[1] == "end"
libc = ctypes.CDLL(None)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
kept = []


def guarded(shape, dtype):
    size = max(1, torch.Size(shape).numel()) * dtype.itemsize
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    kept.append(memory)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        assert libc.mprotect(base + page * mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0
    start = mmap.PAGESIZE + (pages * mmap.PAGESIZE - size if AT_END else 0)
    return torch.frombuffer(memory, dtype=dtype, count=torch.Size(shape).numel(), offset=start).view(shape)


def guard(tensor):
    copy = guarded(tensor.shape, tensor.dtype)
    copy.copy_(tensor)
    return copy


empty = torch.empty
torch.empty = lambda shape, dtype: guarded(shape, dtype)
torch.empty_like = lambda tensor: guarded(tensor.shape, tensor.dtype)
torch.Tensor.new_empty = lambda tensor, shape: guarded(shape, tensor.dtype)
ops.set_threads(int(sys.argv[2]))

for dtype in (torch.bfloat16, torch.float32):
    for rows, width, columns in ((1, 2, 1), (3, 34, 17), (7, 62, 70), (100, 256, 130), (140, 1216, 9)):
        layer = ops.pack_linear(guard(torch.randn(columns, width).to(dtype)), guard(torch.randn(columns).to(dtype)))
        assert layer.kernels is not None
        ops.linear(guard(torch.randn(rows, width).to(dtype)), layer)
        ops.linear(guard(torch.randn(rows, width).to(dtype)), layer, torch.float32)
        gated = ops.pack_linear(guard(torch.randn(32 * columns, width).to(dtype)))
        ops.gated_linear(guard(torch.randn(rows, width).to(dtype)), gated, "silu")
        x, weight = guard(torch.randn(rows, width).to(dtype)), guard(torch.randn(width).to(dtype))
        ops.rms_norm(x, weight, 1e-5)
        ops.add_rms_norm(x, guard(x.float()), weight, 1e-5)
        ops.gated_activation(x, "silu")
    for page, head_dim, lengths in ((1, 16, [5, 1]), (16, 80, [33, 16]), (3, 256, [65, 300]), (128, 64, [129, 500])):
        pages = [-(-length // page) for length in lengths]
        table = torch.zeros(2, max(pages), dtype=torch.int32)
        table[0, : pages[0]] = torch.arange(pages[0])
        table[1, : pages[1]] = torch.arange(pages[1]) + pages[0]
        k, v = (guard(torch.randn(sum(pages), 2, page, head_dim).to(dtype)) for _ in range(2))
        queries = [min(length, 40) for length in lengths]
        start = guard(torch.tensor([0, queries[0], sum(queries)], dtype=torch.int32))
        q = guard(torch.randn(sum(queries), 6, head_dim).to(dtype))
        batch = ops.PagedBatch(guard(table), start, guard(torch.tensor(lengths, dtype=torch.int32)), 40, 500)
        ops.attention(q, k, v, batch, ops.AttentionParams(1.0))
        qkv, norm = guard(torch.randn(3, 10 * head_dim).to(dtype)), guard(torch.randn(head_dim).to(dtype))
        where = guard(torch.tensor([0, 1, sum(pages) * page - 1]))
        positions, cos_sin = guard(torch.tensor([0, 2, 4])), guard(torch.randn(5, head_dim // 2))
        ops.rope_store_kv(qkv, positions, where, k, v, ops.RopeParams(6, 2, cos_sin, norm, norm, 1e-6))
print("whole")
'''


@pytest.mark.parametrize("side", ["start", "end"])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_no_access_outside(side, threads):
    command = [sys.executable, "-c", GUARDED, side, threads]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
