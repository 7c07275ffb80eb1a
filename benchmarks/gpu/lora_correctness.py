"""The low-rank op on the device against plain torch, the draw against its definition, and the mask bit for bit.

All by the functions that the engine calls, on tensors of the types that it passes. A result without the kernel that it
is to check counts as wrong: it would be that of plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.gpu.correctness import TOLERANCE, error_of
from benchmarks.gpu.measure import Line, Machine, launches
from rootgraft.engine.sampling import top_k_top_p
from rootgraft.kernels import lora_reference, reference, sampling_ops
from rootgraft.kernels.layouts.attention_arguments import RopeParams
from rootgraft.kernels.layouts.draw_params import COLUMNS, DrawParams, DrawTable
from rootgraft.kernels.lora_ops import (
    Factors,
    SlotTable,
    lora_add_rms_norm,
    lora_embed,
    lora_rope_store_kv,
    lora_shrink_beside,
    lora_shrink_expand,
)
from rootgraft.lora.segments import make_segments

PRODUCT, EMBEDDING = {"_shrink", "_expand"}, {"_gather", "_expand"}
ROTATED, NORMED = {"_shrink", "_expand_rope_store"}, {"_shrink", "_expand_add_norm"}
DRAW, MASK = {"_stats", "_deviations", "_sums", "_levels", "_pick", "_draw"}, {"_mask"}
# Of an fp32 y: between the two kernels values have 16 bits of mantissa where factors are bf16.
WIDE_TOLERANCE = 1e-4


def run(machine: Machine) -> Iterator[Line]:
    """Errors as a share of what is tolerated; of a mask, twice the rows that differ: one is too many."""
    for dtype in [torch.float32] if machine.tiny else [torch.bfloat16, torch.float16]:
        for y in dict.fromkeys((dtype, torch.float32)):  # logits and the residual stream are fp32
            yield from _lora(machine, dtype, y)
        for name, error_within, kernels in (("rotation", _rotated_error, ROTATED), ("norm", _normed_error, NORMED)):
            with launches() as launched:
                error = error_within(machine, dtype) / TOLERANCE[dtype]
            of = str(dtype).removeprefix("torch.")
            yield _line(f"lora within a {name}, {of}", error, "of tolerance", kernels - launched)
    with launches() as launched:
        share = _draw_differences(machine)
    yield _line("draw, rows that differ", share, "of tolerance", DRAW - launched)
    with launches() as launched:
        wrong = 2 * _mask_differences(machine)
    yield _line("mask, twice the rows that differ", wrong, "rows", MASK - launched)


def _lora(machine: Machine, dtype: torch.dtype, y: torch.dtype) -> Iterator[Line]:
    tolerance = TOLERANCE[y] if y is dtype else WIDE_TOLERANCE
    name = " to ".join(str(each).removeprefix("torch.") for each in dict.fromkeys((dtype, y)))
    for kind, counts in {"short": (1, 3, 0, 1), "long": (70, 64, 30, 150)}.items():
        with launches() as launched:
            error = _product_error(machine, dtype, y, counts[: 2 if machine.tiny else 4])
        yield _line(f"lora, {kind} segments, {name}", error / tolerance, "of tolerance", PRODUCT - launched)
    with launches() as launched:
        error = _embed_error(machine, dtype, y)
    yield _line(f"lora embedding, {name}", error / tolerance, "of tolerance", EMBEDDING - launched)


def _line(name: str, value: float, unit: str, missing: set[str]) -> Line:
    note = f"never launched: {', '.join(sorted(missing))}" if missing else ""
    return Line("correctness", name, float("inf") if missing else value, unit, note=note)


def _table(machine: Machine, dtype: torch.dtype, sizes: tuple[int, ...], width: int, *, embed: bool) -> SlotTable:
    """Return four slots of different ranks. One does not change the last module; two have a gain and an addend."""
    table = SlotTable(sizes, width, 4, dtype, machine.device)
    for slot, rank in enumerate((16, 5, 64, 200)):
        ranks = (rank, *(8,) * (len(sizes) - 1)) if slot != 1 else (rank, *(0,) * (len(sizes) - 1))
        total, columns = sum(ranks), sum(sizes)
        cells = sum(r * size for r, size in zip(ranks, sizes, strict=True))
        a = machine.randn(*((width, total) if embed else (total, width)), dtype=dtype)
        scale = torch.full((total,), 1.0 if embed else width**-0.5, device=machine.device)
        vectors = [machine.randn(columns, dtype=torch.float32) if slot % 2 else None for _ in range(2)]
        table.put(slot, Factors(a, scale, ranks, machine.randn(cells, dtype=dtype) * rank**-0.5, *vectors))
    return table


def _of_tokens(counts: tuple[int, ...]) -> np.ndarray:
    slots = np.repeat(np.arange(-1, len(counts), dtype=np.int32), [5, *counts])
    return np.random.default_rng(0).permutation(slots).astype(np.int32)


def _product_error(machine: Machine, dtype: torch.dtype, y_dtype: torch.dtype, counts: tuple[int, ...]) -> float:
    sizes, width = ((96, 64), 128) if machine.tiny else ((4096, 1024, 1000), 4096)
    table = _table(machine, dtype, sizes, width, embed=False)
    slots = _of_tokens(counts)
    segments = make_segments(slots, machine.device)
    assert segments is not None
    x, y = machine.randn(len(slots), width, dtype=dtype), machine.randn(len(slots), sum(sizes), dtype=y_dtype)
    expected = y.clone().float()
    lora_shrink_expand(y, x, table, segments)
    lora_reference.lora_shrink_expand(expected, x, None, table, segments)
    return error_of(y, expected.double())


def _rotated_error(machine: Machine, dtype: torch.dtype) -> float:
    """The error of queries, keys and values that are rotated and stored behind q, k and v with adapters."""
    heads, kv_heads, dim, width = (2, 1, 32, 64) if machine.tiny else (32, 8, 128, 4096)
    table = _table(machine, dtype, (heads * dim, kv_heads * dim, kv_heads * dim), width, embed=False)
    slots = _of_tokens((1, 3, 0, 1))
    segments = make_segments(slots, machine.device)
    assert segments is not None
    x, qkv = machine.randn(len(slots), width, dtype=dtype), machine.randn(len(slots), sum(table.sizes), dtype=dtype)
    caches = machine.randn(2, 1, kv_heads, 16, dim, dtype=dtype)
    places = machine.ints(list(range(len(slots))), torch.int64)
    params = RopeParams(heads, kv_heads, machine.randn(16, dim, dtype=torch.float32))
    wide, expected = qkv.to(torch.float32, copy=True), caches.double()
    lora_reference.lora_shrink_expand(wide, x, None, table, segments)
    wanted = reference.rope_store_kv(wide.double(), places, places, expected[0], expected[1], params)
    shrunk = lora_shrink_beside(x, table, segments)
    q = lora_rope_store_kv(qkv, x, places, places, caches[0], caches[1], params, table, segments, shrunk)
    return max(error_of(q, wanted), error_of(caches, expected))


def _normed_error(machine: Machine, dtype: torch.dtype) -> float:
    """The error of the norm of a residual stream behind an output projection with adapters."""
    hidden, width = (64, 96) if machine.tiny else (4096, 14336)
    table = _table(machine, dtype, (hidden,), width, embed=False)
    slots = _of_tokens((1, 3, 0, 1))
    segments = make_segments(slots, machine.device)
    assert segments is not None
    x, y = machine.randn(len(slots), width, dtype=dtype), machine.randn(len(slots), hidden, dtype=dtype)
    residual, weight = machine.randn(len(slots), hidden, dtype=torch.float32), machine.randn(hidden, dtype=dtype)
    wide = y.to(torch.float32, copy=True)
    lora_reference.lora_shrink_expand(wide, x, None, table, segments)
    total = residual.double() + wide.double()
    wanted = total * torch.rsqrt(total.square().mean(1, keepdim=True) + 1e-5) * weight.double()
    shrunk = lora_shrink_beside(x, table, segments)
    out = lora_add_rms_norm(y, x, residual, weight, 1e-5, 0.0, table, segments, shrunk)
    return max(error_of(out, wanted), error_of(residual, total))


def _embed_error(machine: Machine, dtype: torch.dtype, y_dtype: torch.dtype) -> float:
    vocab, hidden = (50, 64) if machine.tiny else (5000, 4096)
    table = _table(machine, dtype, (hidden,), vocab, embed=True)
    slots = _of_tokens((3, 4, 1, 2))
    segments = make_segments(slots, machine.device)
    assert segments is not None
    ids = torch.randint(0, vocab, (len(slots),), device=machine.device)
    y = machine.randn(len(slots), hidden, dtype=y_dtype)
    expected = y.clone().float()
    lora_embed(y, ids, table, segments)
    lora_reference.lora_shrink_expand(expected, None, ids, table, segments)
    return error_of(y, expected.double())


def _draw_differences(machine: Machine) -> float:
    """Rows of many parameters whose token is not the one that is defined, as a share of one row in a hundred.

    Sums of exponentials differ from the host's in their last bits, so that a row at an edge may differ.
    """
    count, vocab = (6, 640) if machine.tiny else (512, 128_256)
    logits = (machine.randn(count, vocab, dtype=torch.float32) * 3).mul_(4).round_().div_(4)
    if not sampling_ops.has_kernel(logits):
        return 0.0  # the line tells that none was launched
    rng = np.random.default_rng(1)
    kind = np.dtype([*((name, str(dtype).removeprefix("torch.")) for name, dtype in COLUMNS.items()), ("seed", "u8")])
    rows = np.zeros(count, kind)
    rows["temperature"] = rng.choice([0.0, 0.3, 1.0, 1.7], count)
    rows["top_k"] = rng.choice([0, 0, 1, 40, 3000], count)
    rows["top_p"] = rng.choice([0.1, 0.9, 0.99, 1.0], count)
    rows["min_p"] = rng.choice([0.0, 0.0, 0.05], count)
    rows["seed"] = rng.integers(0, 1 << 63, count)
    table = DrawTable(count, machine.device)
    table.write(np.arange(count), rows)
    lines = torch.arange(count, device=machine.device)[:, None].repeat(1, 2)
    drawn = sampling_ops.draw_lines(logits, table.rows, lines).tolist()
    expected = [_defined(line, rows[at : at + 1], at) for at, line in enumerate(logits.cpu().split(1))]
    wrong: int = sum(a != b for a, b in zip(drawn, expected, strict=True))
    return wrong / (count / 100)


def _defined(logits: torch.Tensor, row: np.ndarray, position: int) -> int:
    """The token that ``top_k_top_p`` defines for a line."""
    if row["temperature"][0] <= 0:
        return int(logits.argmax())
    best, at = logits.amax(1, keepdim=True), np.array([position], np.uint64)
    noise = torch.from_numpy(top_k_top_p.exponentials(row["seed"], at, top_k_top_p.num_noise(logits.shape[1])))
    uniforms = top_k_top_p.uniforms(row["seed"], at)
    columns = {name: row[name] for name in COLUMNS}
    draws = DrawParams.of(columns, lambda each: torch.from_numpy(each[:, None].copy()), uniforms, noise)
    padded = top_k_top_p.pad(logits)
    if row["top_k"][0] > 0 or row["top_p"][0] < 1:
        return int(top_k_top_p.draw_kept(padded, best, draws))
    return int(top_k_top_p.draw_any(padded, best, draws, bool(row["min_p"][0] > 0)))


def _mask_differences(machine: Machine) -> int:
    rows, vocab = (3, 500) if machine.tiny else (64, 128_256)
    logits = machine.randn(rows, vocab, dtype=torch.float32)
    words = torch.randint(-(1 << 31), 1 << 31, (rows, -(-vocab // 32)), dtype=torch.int32, device=machine.device)
    expected = logits.masked_fill(sampling_ops._banned(words, vocab), -torch.inf)
    sampling_ops.mask_logits(logits, torch.arange(rows, device=machine.device), words)
    return int((logits != expected).any(1).sum())
