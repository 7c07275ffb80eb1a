"""CPU time of products with each form of weights, in turns, so that other load of the machine disturbs all alike.

    python -m benchmarks.weight_forms_cpu [--width 2048] [--outputs 4096] [--rounds 20] [--out FILE]
    python -m benchmarks.weight_forms_cpu --forms "bfloat16,int8_weight_only,FP8 of rows,FP8 in blocks" --rounds 100

Each form's weight is flushed from all caches before its product. The least processor time of the rounds counts, and
its ratio to that of the form that it is to be as fast as: blocks with zero points (GPTQ, AWQ) to Q4_1, symmetric ones
are Q4_0 itself, integers of 8 bits and FP8 to ``int8_weight_only``, integers with activations in 8 bits too to
``int8_dynamic``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from rootgraft.engine.loading.measured_form import random_bytes
from rootgraft.kernels import ops, quantised_weights
from rootgraft.kernels.ops import Linear, pack_linear
from rootgraft.kernels.quantised_weights import BlockType, Format

ROWS: Final = (1, 4, 8, 16, 24, 64)
PEERS: Final = {
    "U4_ZERO_POINT": "Q4_1",
    "8 bits of rows": "int8_weight_only",
    "FP8 of rows": "int8_weight_only",
    "FP8 in blocks": "int8_weight_only",
    "8 bits of rows, x too": "int8_dynamic",
}
"""Forms of folders, and those that they are compared with."""
_BLOCKS: Final[tuple[BlockType, ...]] = (
    *("Q4_0", "Q4_1", "U4_ZERO_POINT", "Q8_0"),
    *("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "E2M1", "NVFP4", "IQ2"),
)
_GROUP: Final = 128


def forms(width: int, outputs: int) -> dict[str, Linear]:
    """A random weight [outputs, width] in each form."""
    shape = outputs, width
    plain = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    integers = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    floats = plain.float().mul(100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)

    def of_bytes(numbers: torch.Tensor, groups: int, form: Format) -> Linear:
        scales = torch.full((outputs, groups), 0.01)
        return quantised_weights.pack_bytes([numbers], shape, scales, form=form)

    blocks = {kind: random_bytes(kind, width, outputs * width) for kind in _BLOCKS}
    return {
        "bfloat16": pack_linear(plain, None),
        **{kind: quantised_weights.pack_blocks(raw, kind, widened=True) for kind, raw in blocks.items()},
        "int8_weight_only": quantised_weights.pack_channels(plain, dynamic=False),
        "int8_dynamic": quantised_weights.pack_channels(plain, dynamic=True),
        "8 bits of rows": of_bytes(integers, 1, Format.WIDENED),
        "FP8 of rows": of_bytes(floats, 1, Format.FLOAT8),
        "FP8 in blocks": of_bytes(floats, -(-width // _GROUP), Format.FLOAT8),
        "8 bits of rows, x too": of_bytes(integers, 1, Format.CHANNELS),
    }


def least_times(layers: dict[str, Linear], rows: int, rounds: int) -> dict[str, float]:
    """The least processor seconds of a product with each, one after the other in each round."""
    width = next(iter(layers.values())).in_features
    x = torch.randn(rows, width).bfloat16()
    least = dict.fromkeys(layers, float("inf"))
    for _ in range(rounds):
        for name, layer in layers.items():
            if isinstance(layer, ops.QuantisedLinear):
                quantised_weights.flush(layer)
            begin = time.process_time()
            ops.linear(x, layer)
            least[name] = min(least[name], time.process_time() - begin)
    return least


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--forms", help="names of forms, separated by commas; all by default")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    layers, load = forms(options.width, options.outputs), os.getloadavg()
    if options.forms:
        layers = {name: layers[name] for name in options.forms.split(",")}
    times = {rows: least_times(layers, rows, options.rounds) for rows in ROWS}
    result = {
        "machine": platform.processor() or platform.machine(),
        "kernels": ops.native_status(),
        "load_before": load,
        "shape": [options.outputs, options.width],
        "milliseconds": {rows: {name: round(1e3 * each, 3) for name, each in of.items()} for rows, of in times.items()},
        "times_the_peer": {
            rows: {name: round(of[name] / of[peer], 2) for name, peer in PEERS.items() if {name, peer} <= of.keys()}
            for rows, of in times.items()
        },
    }
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text, file=sys.stdout)


if __name__ == "__main__":
    main()
