"""Speed of one model on two ranks of one thread each, beside one process of two threads, in turns.

    python -m benchmarks.rank_speed [--pairs 5] [--requests 8] [--tokens 64] [--way tensor|pipeline] [--output FILE]

Random weights in the shape of a model of 0.5 billion parameters, in bfloat16. Each run answers so many prompts of 256
tokens at once, in a process of its own; told are seconds and processor seconds of all ranks together, without the
start. Other work on the machine changes both: the ratios of pairs, which are taken side by side, say more than seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serve.server import ROOT, machine

PROMPT = 256
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WAYS = {"tensor": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}


def run_here(folder: str, options: dict[str, Any], requests: int, tokens: int) -> dict[str, float]:
    """Answer the prompts once to warm up, and once more, which is measured."""
    from rootgraft import LLM, SamplingParams
    from rootgraft.engine.checkpoint.locate import resolve_model

    llm = LLM(
        folder,
        load_format="dummy",
        device="cpu",
        tokenizer=str(resolve_model(None).path),
        num_gpu_blocks_override=2000,
        enable_prefix_caching=False,
        speculative_config='{"method": "off"}',
        **options,
    )
    prompts = [[(7 * i + 13 * j) % 31000 + 3 for j in range(PROMPT)] for i in range(requests)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    seconds = {}
    for _ in range(2):
        begin, cpu = time.perf_counter(), _processor_seconds()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = {"seconds": time.perf_counter() - begin, "processor_seconds": _processor_seconds() - cpu}
    llm.close()
    return seconds


def _processor_seconds() -> float:
    """Return the processor seconds of this process and of the other ranks."""
    own = psutil.Process(os.getpid())
    return sum(sum(each.cpu_times()[:2]) for each in (own, *own.children()))


def run_apart(folder: str, options: dict[str, Any], requests: int, tokens: int) -> dict[str, float]:
    words = json.dumps([folder, options, requests, tokens])
    command = [sys.executable, "-m", "benchmarks.rank_speed", "--run", words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Measure in turns, print, write the file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--way", choices=WAYS, default="tensor")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run_here(*json.loads(args.run))))
        return 0
    ways = {"one": {"threads": 2}, "two": {"threads": 1, **WAYS[args.way]}}
    pairs: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        for number in range(args.pairs):
            order = sorted(ways, reverse=bool(number % 2))
            pairs.append({way: run_apart(folder, ways[way], args.requests, args.tokens) for way in order})
            print(json.dumps(pairs[-1]), flush=True)
    ratios = {
        key: round(statistics.median(pair["two"][key] / pair["one"][key] for pair in pairs), 3)
        for key in ("seconds", "processor_seconds")
    }
    document = {"command": " ".join(sys.argv), "machine": machine(), "ratios_two_ranks_to_one": ratios, "pairs": pairs}
    if args.output is not None:
        args.output.write_text(json.dumps(document, indent=2) + "\n")
    print(f"Two ranks take {ratios['seconds']} times as long as one process of two threads: {ratios}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
