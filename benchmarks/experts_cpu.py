"""A decode step of a mixture of experts on the CPU, against the time in which its bytes come from memory.

    python -m benchmarks.experts_cpu [--threads 2] [--dtype bfloat16] [--quantization int8_weight_only] [--steps 10]

The model has random weights: 16 experts, 4 of them active, 1.0 G parameters active of 3.5 G (6.9 GB in bfloat16). One
stream decodes; a step reads the weights of attention, of four experts a layer, and of the head. Prints one JSON object:
``ratio`` is the step's time over that of reading these bytes at the rate of one large product.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.profiling.step_profiler import measure_steps
from rootgraft.engine.profiling.step_report import StepLoad, StepTimes

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "moe_intermediate_size": 2048,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
}
PARTS = ("linear", "experts", "head")  # Parts of a step that read weights.


def measure(options: argparse.Namespace) -> StepTimes:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        config = EngineConfig(
            model=folder,
            device="cpu",
            dtype=options.dtype,
            quantization=options.quantization,
            load_format="dummy",
            max_model_len=2048,
            kv_cache_memory=0.1,
            threads=options.threads,
        )
        return measure_steps(config, Path(folder), StepLoad(1, options.context, 0, 0, options.steps))


def report(times: StepTimes, options: argparse.Namespace) -> dict[str, object]:
    limits = {name: times.parts[name].limit or 0.0 for name in PARTS}
    least = sum(limits.values())
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "dtype": options.dtype,
        "quantization": options.quantization,
        "threads": options.threads,
        "summary": list(times.summary),
        "gigabytes": {name: round(limit * times.reading / 1e9, 3) for name, limit in limits.items()},
        "gigabytes_a_second": round(times.reading / 1e9, 2),
        "step_ms": round(times.untimed * 1e3, 2),
        "least_ms": round(least * 1e3, 2),
        "ratio": round(times.untimed / least, 3),
        "parts_ms": {name: round(part.seconds * 1e3, 2) for name, part in times.parts.items()},
        "parts_ratio": {name: round(times.parts[name].seconds / limit, 3) for name, limit in limits.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--quantization", choices=("int8_weight_only", "int8_dynamic"))
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    print(json.dumps(report(measure(options), options), indent=2))


if __name__ == "__main__":
    main()
