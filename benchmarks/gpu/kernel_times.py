"""Times of the kernels in the shapes of Llama-3.1-8B, against their floor and against torch's attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from benchmarks.gpu.batches import Batch, make_batch
from benchmarks.gpu.measure import Ceilings, Line, Machine, seconds
from rootgraft.kernels import ops

HIDDEN, INNER = 4096, 14336
HEADS = (32, 8, 128)  # Heads of queries, heads of keys, dimensions of each.
_TINY_HEADS = (2, 1, 64)
CACHED = 256 << 20  # bytes of distinct inputs, more than any cache of a device holds


def run(machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    """Microseconds of each kernel; the floor is that of the bytes and products it cannot do without."""
    yield from _decode(machine, ceilings)
    yield from _extend(machine, ceilings)
    yield from _shared(machine, ceilings)
    yield from _elementwise(machine, ceilings)


def _copies(machine: Machine, num_bytes: int) -> int:
    """How many distinct inputs to walk over."""
    return 1 if machine.tiny else max(1, min(64, CACHED // num_bytes))


def _heads(machine: Machine) -> tuple[int, int, int]:
    return _TINY_HEADS if machine.tiny else HEADS


def _line(name: str, took: float, floor: float, note: str = "") -> Line:
    return Line("kernels", name, took * 1e6, "us", floor * 1e6, note)


def _attend_line(
    machine: Machine,
    ceilings: Ceilings,
    name: str,
    batches: list[Batch],
    *,
    sharing: bool = True,
    gathering: bool = False,
) -> Line:
    calls = [lambda batch=batch: batch.attend(0.1, sharing=sharing, gathering=gathering) for batch in batches]
    took = seconds(machine, calls)
    return _line(name, took, _floor(ceilings, batches[0]))


def _floor(ceilings: Ceilings, batch: Batch) -> float:
    _, heads, dim = batch.q.shape
    return ceilings.seconds(read=batch.kv_bytes, flops=4 * batch.pairs * heads * dim)


def _batches(machine: Machine, rows: list[tuple[int, int]], shared_pages: int = 0) -> list[Batch]:
    heads, kv_heads, dim = _heads(machine)

    def make() -> Batch:
        return make_batch(machine, rows, heads=heads, kv_heads=kv_heads, dim=dim, shared_pages=shared_pages)

    first = make()
    return [first, *(make() for _ in range(_copies(machine, first.kv_bytes) - 1))]


def _sdpa_line(machine: Machine, ceilings: Ceilings, name: str, batches: list[Batch]) -> Line:
    """torch's attention on the same numbers without pages, for rows of one length."""
    calls = []
    for batch in batches:
        rows, query = len(batch.rows), batch.rows[0][0]
        q = batch.q.view(rows, query, *batch.q.shape[1:]).transpose(1, 2).contiguous()
        k, v = (torch.stack([batch.dense(c, row) for row in range(rows)]) for c in (batch.k_cache, batch.v_cache))
        calls.append(
            lambda q=q, k=k, v=v, causal=query > 1: functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=True
            )
        )
    return _line(f"{name}, torch SDPA", seconds(machine, calls), _floor(ceilings, batches[0]))


def _decode(machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    sizes = [(2, 40)] if machine.tiny else [(b, c) for c in (1024, 4096) for b in (1, 8, 32, 64, 128)]
    for rows, context in sizes:
        name = f"decode, {rows} rows of {context}"
        batches = _batches(machine, [(1, context)] * rows)
        yield _attend_line(machine, ceilings, name, batches)
        yield _sdpa_line(machine, ceilings, name, batches)
    if not machine.tiny:
        mixed = _batches(machine, [(1, 16384), *[(1, 512)] * 63])
        yield _attend_line(machine, ceilings, "decode, 63 rows of 512 and one of 16384", mixed)


def _extend(machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    """For the gate of ``rootgraft.kernels.gathered_attention``: where a copy of the pages begins to pay."""
    sizes = [(9, 9), (3, 9)] if machine.tiny else [(512, 512), (2048, 2048), (8192, 8192), (512, 8192), (2048, 8192)]
    for query, context in sizes:
        name = f"extend, {query} tokens of {context}"
        batches = _batches(machine, [(query, context)])[:4]
        yield _attend_line(machine, ceilings, name, batches)
        yield _attend_line(machine, ceilings, f"{name}, gathered", batches, gathering=True)
        if query == context:
            yield _sdpa_line(machine, ceilings, name, batches)


def _shared(machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    """For the gate of ``rootgraft.kernels.triton.shared_prefixes``: where reading together begins to pay."""
    sizes = [(8, 1024)] if machine.tiny else [(8, 1024), (32, 1024), (64, 1024), (16, 4096), (64, 4096)]
    for rows, tokens in sizes:
        batches = _batches(machine, [(1, tokens + (8 if machine.tiny else 128))] * rows, shared_pages=tokens // 16)
        name = f"decode, {rows} rows that share {tokens}"
        yield _attend_line(machine, ceilings, f"{name}, read together", batches)
        if not machine.tiny:
            yield _attend_line(machine, ceilings, f"{name}, read alone", batches, sharing=False)


def _elementwise(machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    for tokens in (2,) if machine.tiny else (1, 64, 2048):
        yield _norm_line(machine, ceilings, tokens)
        yield _activation_line(machine, ceilings, tokens)
        yield _rope_line(machine, ceilings, tokens)


def _norm_line(machine: Machine, ceilings: Ceilings, tokens: int) -> Line:
    width = 64 if machine.tiny else HIDDEN
    weight = machine.randn(width)
    inputs = [
        (machine.randn(tokens, width), machine.randn(tokens, width, dtype=torch.float32))
        for _ in range(_copies(machine, tokens * width * 8))
    ]
    took = seconds(machine, [partial(ops.add_rms_norm, x, total, weight, 1e-5) for x, total in inputs])
    moved = tokens * width * (2 * weight.element_size() + 8)
    return _line(f"add_rms_norm, {tokens} tokens", took, moved / ceilings.copy)


def _activation_line(machine: Machine, ceilings: Ceilings, tokens: int) -> Line:
    inner = 64 if machine.tiny else INNER
    inputs = [machine.randn(tokens, 2 * inner) for _ in range(_copies(machine, tokens * inner * 6))]
    took = seconds(machine, [partial(ops.gated_activation, gate_up, "silu") for gate_up in inputs])
    return _line(f"gated_activation, {tokens} tokens", took, 1.5 * inputs[0].nbytes / ceilings.copy)


def _rope_line(machine: Machine, ceilings: Ceilings, tokens: int) -> Line:
    heads, kv_heads, dim = _heads(machine)
    total = (heads + 2 * kv_heads) * dim
    inputs = [machine.randn(tokens, total) for _ in range(_copies(machine, 2 * tokens * total * 2))]
    k_cache, v_cache = machine.randn(2, tokens, kv_heads, 16, dim)
    table = machine.randn(4096, dim, dtype=torch.float32)
    positions = machine.ints(list(range(tokens)), torch.int64)
    cells = positions * 16
    params = ops.RopeParams(heads, kv_heads, table)
    calls = [partial(ops.rope_store_kv, qkv, positions, cells, k_cache, v_cache, params) for qkv in inputs]
    floor = (2 * tokens * total * inputs[0].element_size() + tokens * dim * 4) / ceilings.copy
    return _line(f"rope_store_kv, {tokens} tokens", seconds(machine, calls), floor)
