"""Times of the CPU kernels on the shapes of a small Llama: each op against torch's, and a whole layer.

    python -m benchmarks.kernels_cpu [--threads 2] [--sections linear quantised attention small layer]

Weights and caches are walked over many distinct copies, so that they come from memory as in a real step. Every time is
the least of several repeats, in microseconds for each call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from rootgraft.kernels import ops, quantised_weights, reference
from rootgraft.kernels.layouts import int8_kv_layout
from rootgraft.kernels.machine_limits import least_time, products_rate, reading_rate

BF16 = torch.bfloat16
HIDDEN, INNER, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, PAGE = 576, 1536, 49152, 9, 3, 64, 16
LAYERS = 30
EPS = 1e-5
SHAPES = {  # name -> in, out, copies
    "qkv": (HIDDEN, 960, LAYERS),
    "o": (HIDDEN, HIDDEN, LAYERS),
    "gate_up": (HIDDEN, 2 * INNER, LAYERS),
    "down": (INNER, HIDDEN, LAYERS),
    "head": (HIDDEN, VOCABULARY, 3),
}


def linear_times(weights: list[Tensor], layers: list[ops.PackedLinear], x: Tensor) -> tuple[float, float, float]:
    """Ours, oneDNN with the weight laid out for it, F.linear."""
    reordered = [torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0]) for weight in weights]
    pointwise, copies = torch.ops.mkldnn._linear_pointwise, len(weights)
    return (
        least_time(lambda: [ops.linear(x, layer) for layer in layers], copies),
        least_time(lambda: [pointwise(x, weight, None, "none", [], "") for weight in reordered], copies),
        least_time(lambda: [functional.linear(x, weight) for weight in weights], copies),
    )


def bench_linear() -> None:
    print(f"{'linear':8} {'M':>4} {'ours':>9} {'oneDNN':>9} {'F.linear':>9} {'GFLOP/s':>8} {'GB/s':>6}")
    for name, (width, columns, copies) in SHAPES.items():
        weights = [torch.randn(columns, width).to(BF16) for _ in range(copies)]
        layers = [ops.pack_linear(weight) for weight in weights]
        for rows in (1, 2, 8, 32, 128) if name == "head" else (1, 2, 8, 32, 128, 512):
            ours, theirs, plain = linear_times(weights, layers, torch.randn(rows, width).to(BF16))
            rates = f"{2 * rows * width * columns / ours / 1e3:8.0f} {2 * width * columns / ours / 1e3:6.1f}"
            print(f"{name:8} {rows:4} {ours:9.1f} {theirs:9.1f} {plain:9.1f} {rates}", flush=True)


def random_blocks(
    columns: int, width: int, block_type: quantised_weights.BlockType, *, dynamic: bool = False
) -> ops.QuantisedLinear:
    """Random integers, scales (and minima) of about 1."""
    size, halves = quantised_weights.BLOCK_SIZES[block_type][1], 2 if block_type == "Q4_1" else 1
    raw = torch.randint(256, (columns, width // 32, size), dtype=torch.uint8)
    raw[:, :, : 2 * halves] = torch.randn(columns, width // 32, halves).half().view(torch.uint8)
    return quantised_weights.pack_blocks(raw.view(columns, -1), block_type, dynamic=dynamic)


def run_products(x: Tensor, layers: Sequence[ops.Linear]) -> None:
    for layer in layers:
        ops.linear(x, layer)


def bench_quantised() -> None:
    """Times of a form, how much faster than bf16 that is, and its share of two limits.

    ``% read``: bytes of the weight a second, of those of reading 226 MB; above 100 where a part of all copies stays in
    the last cache. ``% peak``: products a second, of twice those of bf16 where x is rounded to 8 bits, for the machine
    multiplies twice as many bytes in an instruction; else of those of bf16.
    """
    read, peak = reading_rate() / 1e6, products_rate(BF16) / 1e9
    print(f"\nreading: {read / 1e3:.1f} GB/s; bf16: {peak:.0f} G products/s")
    print(f"{'quantised':8} {'M':>4} {'bf16':>9} " + " ".join(f"{name:>32}" for name in FORMS))
    print(f"{'':23} " + " ".join(f"{'us':>9} {'x':>6} {'% read':>7} {'% peak':>7}" for _ in FORMS))
    for name, (width, columns, copies) in SHAPES.items():
        plain = [ops.pack_linear(torch.randn(columns, width).to(BF16)) for _ in range(copies)]
        forms = [[make(columns, width) for _ in range(copies)] for make in FORMS.values()]
        for rows in (1, 8, 32, 128) if name == "head" else (1, 8, 32, 128, 512):
            x = torch.randn(rows, width).to(BF16)
            bf16 = least_time(partial(run_products, x, plain), copies)
            cells = []
            for form, layers in zip(FORMS, forms, strict=True):
                took = least_time(partial(run_products, x, layers), copies)
                products = rows * width * columns / took / 1e3
                limit = 2 * peak if form.endswith("dynamic") else peak
                size = layers[0].weight.nbytes + layers[0].scales.nbytes
                cells.append(
                    f"{took:9.1f} {bf16 / took:6.2f} {100 * size / took / read:7.0f} {100 * products / limit:7.0f}"
                )
            print(f"{name:8} {rows:4} {bf16:9.1f} " + " ".join(cells), flush=True)


FORMS: dict[str, Callable[[int, int], ops.QuantisedLinear]] = {
    "Q4_1": lambda columns, width: random_blocks(columns, width, "Q4_1"),
    "Q8_0": lambda columns, width: random_blocks(columns, width, "Q8_0"),
    "Q4_1 dynamic": lambda columns, width: random_blocks(columns, width, "Q4_1", dynamic=True),
    "Q8_0 dynamic": lambda columns, width: random_blocks(columns, width, "Q8_0", dynamic=True),
    "int8_dynamic": lambda columns, width: quantised_weights.pack_channels(torch.randn(columns, width), dynamic=True),
    "int8_weight_only": lambda columns, width: quantised_weights.pack_channels(
        torch.randn(columns, width), dynamic=False
    ),
}


def make_cache(rows: int, context: int, shared: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """K, V and the page table of rows whose pages lie in random order; the first ``shared`` tokens are all rows'."""
    pages = -(-context // PAGE)
    cache = torch.randn(2, rows * pages, KV_HEADS, PAGE, HEAD_DIM).to(BF16)
    table = torch.randperm(rows * pages).to(torch.int32).view(rows, pages)
    table[:, : shared // PAGE] = table[0, : shared // PAGE]
    return cache[0], cache[1], table


def gather_and_sdpa(q: Tensor, k: Tensor, v: Tensor, table: Tensor, context: int, mask: Tensor | None) -> Tensor:
    """Compute attention with torch's ops: pages gathered, KV heads repeated, one call of its fused attention."""
    rows, group = table.shape[0], HEADS // KV_HEADS
    gathered = (cache[table].transpose(1, 2).flatten(2, 3)[:, :, :context] for cache in (k, v))
    keys, values = (cache.repeat_interleave(group, 1) for cache in gathered)
    queries = q.view(rows, -1, HEADS, HEAD_DIM).transpose(1, 2)
    return functional.scaled_dot_product_attention(queries, keys, values, mask).transpose(1, 2).reshape(q.shape[0], -1)


def in_int8(cache: Tensor) -> Tensor:
    """Return memory for the same number of 8-bit cells, filled with numbers."""
    shape = (*cache.shape[:-1], cache.shape[-1] + int8_kv_layout.SCALE_BYTES)
    numbers = torch.randint(0, 256, shape, dtype=int8_kv_layout.DTYPE)
    numbers.flatten(2)[..., PAGE * HEAD_DIM :].view(torch.float32).fill_(0.01)
    return numbers


def attention_times(rows: int, query: int, context: int, shared: int) -> tuple[float, float, float]:
    """Ours, ours with KV of 8 bits, and torch's."""
    caches = [make_cache(rows, context, shared) for _ in range(8 if rows * context < 20_000 else 4)]
    q = torch.randn(rows * query, HEADS, HEAD_DIM).to(BF16)
    start = (torch.arange(rows + 1) * query).to(torch.int32)
    lengths = torch.full((rows,), context, dtype=torch.int32)
    mask = None if query == 1 else torch.ones(query, context, dtype=torch.bool).tril(context - query)
    scores = ops.AttentionParams(0.125)

    def ours(caches: list[tuple[Tensor, Tensor, Tensor]]) -> float:
        batches = [(k, v, ops.PagedBatch(table, start, lengths, query, context)) for k, v, table in caches]
        return least_time(lambda: [ops.attention(q, *batch, scores) for batch in batches], len(batches))

    of_bytes = [(in_int8(k), in_int8(v), table) for k, v, table in caches]
    return (
        ours(caches),
        ours(of_bytes),
        least_time(lambda: [gather_and_sdpa(q, *cache, context, mask) for cache in caches], len(caches)),
    )


def bench_attention() -> None:
    print(f"\n{'attention':39} {'ours':>9} {'int8 KV':>9} {'gather+SDPA':>12} {'GFLOP/s':>8} {'GB/s':>6}")
    cases = ((1, 1, 256), (1, 1, 1500), (32, 1, 256), (16, 1, 1500), (8, 5, 300), (8, 100, 1400), (1, 512, 512))
    shared_cases = ((16, 1, 1500, 1488), (8, 1, 1200, 800))
    for rows, query, context, shared in (*((*unshared, 0) for unshared in cases), *shared_cases):
        ours, of_bytes, theirs = attention_times(rows, query, context, shared)
        pairs = rows * query * (2 * context - query + 1) / 2
        rates = f"{4 * pairs * HEADS * HEAD_DIM / ours / 1e3:8.0f} {rows * context * KV_HEADS * 256 / ours / 1e3:6.1f}"
        print(
            f"{rows:3} rows {query:4} x {context:5} tokens {shared:5} shared "
            f"{ours:9.1f} {of_bytes:9.1f} {theirs:12.1f} {rates}",
            flush=True,
        )


def small_ops(rows: int) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """name -> the op, and the same in plain torch."""
    x, residual = torch.randn(rows, HIDDEN).to(BF16), torch.randn(rows, HIDDEN)
    weight, gate_up = torch.randn(HIDDEN).to(BF16), torch.randn(rows, 2 * INNER).to(BF16)
    qkv, table = torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(BF16), torch.randn(2048, HEAD_DIM)
    where = torch.arange(rows)
    caches = torch.zeros(2, rows, KV_HEADS, PAGE, HEAD_DIM, dtype=BF16)
    rope = (qkv, where, where, *caches, ops.RopeParams(HEADS, KV_HEADS, table))
    return {
        "rms_norm": (lambda: ops.rms_norm(x, weight, EPS), lambda: functional.rms_norm(x, (HIDDEN,), weight, EPS)),
        "add_rms_norm": (
            lambda: ops.add_rms_norm(x, residual, weight, EPS),
            lambda: functional.rms_norm(residual.add_(x).to(BF16), (HIDDEN,), weight, EPS),
        ),
        "rope_store_kv": (lambda: ops.rope_store_kv(*rope), lambda: reference.rope_store_kv(*rope)),
        "gated_activation": (
            lambda: ops.gated_activation(gate_up, "silu"),
            lambda: functional.silu(gate_up[:, :INNER]) * gate_up[:, INNER:],
        ),
    }


def repeated(run: Callable[[], object]) -> None:
    for _ in range(50):
        run()


def bench_small() -> None:
    print(f"\n{'small ops':18} {'M':>4} {'ours':>9} {'torch':>9}")
    for rows in (1, 32, 512):
        for name, (ours, theirs) in small_ops(rows).items():
            times = [least_time(partial(repeated, run), 50) for run in (ours, theirs)]
            print(f"{name:18} {rows:4} {times[0]:9.1f} {times[1]:9.1f}", flush=True)


class Layer:
    """One decoder layer's weights and cache, run through ``ops`` whatever serves them."""

    def __init__(self, rows: int, context: int) -> None:
        self.layers = {
            name: ops.pack_linear(torch.randn(n, k).to(BF16) / k**0.5)
            for name, (k, n, _) in SHAPES.items()
            if n < 10_000
        }
        self.k, self.v, table = make_cache(rows, context)
        self.norm = torch.ones(HIDDEN, dtype=BF16)
        self.position = torch.full((rows,), context - 1)
        self.cells = table[:, -1].long() * PAGE + (context - 1) % PAGE
        self.batch = ops.PagedBatch(
            table,
            torch.arange(rows + 1, dtype=torch.int32),
            torch.full((rows,), context, dtype=torch.int32),
            1,
            context,
        )

    def forward(self, x: Tensor, residual: Tensor, table: Tensor) -> Tensor:
        """One decode step of the layer."""
        qkv = ops.linear(ops.add_rms_norm(x, residual, self.norm, EPS), self.layers["qkv"])
        rope = ops.RopeParams(HEADS, KV_HEADS, table)
        q = ops.rope_store_kv(qkv, self.position, self.cells, self.k, self.v, rope)
        mixed = ops.attention(q, self.k, self.v, self.batch, ops.AttentionParams(0.125))
        x = ops.linear(mixed, self.layers["o"])
        gate_up = ops.linear(ops.add_rms_norm(x, residual, self.norm, EPS), self.layers["gate_up"])
        return ops.linear(ops.gated_activation(gate_up, "silu"), self.layers["down"])


def bench_layer() -> None:
    print(f"\n{'layer, decode':24} {'native':>9} {'torch':>9}   (a layer; {LAYERS} of them, {LAYERS} caches)")
    cos_sin = torch.randn(2048, HEAD_DIM)
    for rows, context in ((1, 256), (32, 256)):
        times = []
        for native in (True, False):
            ops.use_native(native)
            layers = [Layer(rows, context) for _ in range(LAYERS)]
            x, residual = torch.randn(rows, HIDDEN).to(BF16), torch.randn(rows, HIDDEN)

            def step(x: Tensor = x, residual: Tensor = residual, layers: list[Layer] = layers) -> None:
                for layer in layers:
                    x = layer.forward(x, residual, cos_sin)

            times.append(least_time(step, LAYERS, budget=2.0))
        ops.use_native(True)
        print(f"{rows:3} rows x {context:4} tokens    {times[0]:9.1f} {times[1]:9.1f}", flush=True)


SECTIONS = {
    "linear": bench_linear,
    "quantised": bench_quantised,
    "attention": bench_attention,
    "small": bench_small,
    "layer": bench_layer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options = parser.parse_args()
    ops.set_threads(options.threads)
    print(f"torch {torch.__version__}; {ops.native_status()}")
    with torch.inference_mode():
        for section in options.sections:
            SECTIONS[section]()


if __name__ == "__main__":
    main()
