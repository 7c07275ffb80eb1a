"""Do three ranks of the real model answer 200 mixed requests as one does?

    PYTHONPATH=tests python -m benchmarks.rank_answers [--requests 200] [--ranks 3] [--way tensor|pipeline]
                                                      [--form gguf|widened|int8_dynamic] [--kv int8]

The model is SmolLM2-135M-Instruct in Q4_1, whose 9 heads and 3 KV heads three ranks divide. Its blocks stay as they
are, unless ``--form`` names another form of weights, and numbers are float32. The requests share prefixes, draw, think,
follow schemas, expressions and formats of calls, ask for logprobs, use adapters of ranks 8 to 64, one with DoRA and one
with a head of its own, and share a small pool; each rank has one thread. Exit code 1 if a token, an end or, by more
than 0.01, a logprob differs, or if no request found a prefix or had drafts.

With ``--kv int8`` a sum whose last bit is another one may move a key by a whole step of its rounding, after which all
later layers round anew. So answers differ there, and the measure is one rank without that rounding: the ranks' logprobs
may differ from those of one rank only by less than the rounding changes them, and a greedy answer may go another way
only where the two tokens are so near.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.engine.core_hooks import core_of
from support.engine.mixed_answers import Answered, assert_same, is_greedy, mixed_answers
from torch import Tensor

from benchmarks.serve.make_adapters import RANKS, random_factors, write_adapter
from rootgraft import LLM
from rootgraft.engine.checkpoint.locate import resolve_model
from rootgraft.engine.checkpoint.read_config import open_checkpoint, read_model_config
from rootgraft.engine.loading.base_layout import planned_layout

PREFIX = "base_model.model."
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 20,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "enable_lora": True,
    "max_loras": 3,
}

SCORES = 20
"""Logprobs of a position, where they are measured."""
SHARES = (0.5, 0.9, 0.99, 1.0)
COUNTS = ("preemptions", "prompt_tokens_cached", "draft_tokens", "draft_tokens_accepted")


def write_adapters(folder: Path) -> list[str]:
    """Write adapters of ranks 8 to 64, one with DoRA, and one with a head of its own; return their names."""
    path = resolve_model(None).path
    config, names = read_model_config(path), []
    for number, rank in enumerate(sorted(set(RANKS))):
        names.append(f"rank{rank}")
        write_adapter(folder / names[-1], random_factors(config, rank, everywhere=number % 2 == 0, seed=number), rank)
    layout = planned_layout(open_checkpoint(path), torch.float32, dummy=False)
    generator = torch.Generator().manual_seed(9)

    def with_dora(tensors: dict[str, Tensor], fields: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
            module = name.removesuffix(".lora_A.weight").removeprefix(PREFIX)
            norms = torch.linalg.vector_norm(layout.read_weight(module), dim=1)
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = norms * (
                1 + 0.05 * torch.randn(len(norms), generator=generator)
            )
        fields["use_dora"] = True

    def with_head(tensors: dict[str, Tensor], fields: dict[str, Any]) -> None:
        head = layout.read_weight("model.embed_tokens").float()
        tensors[f"{PREFIX}lm_head.weight"] = head + 0.01 * torch.randn(head.shape, generator=generator)
        fields["modules_to_save"] = ["lm_head"]

    for name, change in (("dora", with_dora), ("head", with_head)):
        write_adapter(folder / name, random_factors(config, 8, everywhere=True, seed=20), 8)
        change_adapter(folder / name, change)
    return [*names, "dora", "head"]


def change_adapter(folder: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> None:
    """Change tensors and configuration of an adapter in its folder."""
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, fields = load_file(weights), json.loads(config.read_text())
    change(tensors, fields)
    save_file(tensors, weights)
    config.write_text(json.dumps(fields))


def answers(
    count: int, folder: Path, names: list[str], logprobs: int | None = None, **options: Any
) -> tuple[list[Answered], dict[str, float]]:
    """Answer the requests by a model of some ranks. Returns the answers, and what was counted in ``COUNTS``."""
    llm = LLM(**OPTIONS, lora_dir=str(folder), **options)
    try:
        found: list[Answered] = mixed_answers(llm, names, count=count, logprobs=logprobs)
        stats = core_of(llm).stats()
        return found, {name: stats[name] for name in COUNTS}
    finally:
        llm.close()


def same_tokens(one: Answered, other: Answered) -> int:
    """Return the number of tokens before the first that differs."""
    pairs = enumerate(zip(one.tokens, other.tokens, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(one.tokens), len(other.tokens)))


def differences(found: list[Answered], expected: list[Answered]) -> list[float]:
    """Return by how much logprobs differ, ``SHARES`` of them by less, where the tokens before are the same."""
    seen = [0.0]
    for one, other in zip(found, expected, strict=True):
        assert one.scores is not None and other.scores is not None
        for ours, theirs in zip(one.scores[: same_tokens(one, other)], other.scores, strict=False):
            seen += [abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()]
    seen.sort()
    return [seen[round(share * (len(seen) - 1))] for share in SHARES]


def widest_gap(found: list[Answered], expected: list[Answered]) -> float:
    """Return the largest gap of logprobs between a token and the one in its place, of greedy answers that part.

    A structured answer may part between tokens that are not among the ``SCORES`` most likely ones; those are left out.
    """
    gaps = [0.0]
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        at = same_tokens(one, other)
        if is_greedy(number) and at < min(len(one.tokens), len(other.tokens)):
            assert one.scores is not None and other.scores is not None
            ours, theirs = one.tokens[at], other.tokens[at]
            gaps += [
                abs(each[ours] - each[theirs])
                for each in (one.scores[at], other.scores[at])
                if {ours, theirs} <= each.keys()
            ]
    return max(gaps)


def is_within_rounding(found: list[Answered], expected: list[Answered], unrounded: list[Answered]) -> bool:
    """Return whether answers differ by less than the rounding of KV changes them; print by how much."""
    ours, bounds, gap = differences(found, expected), differences(expected, unrounded), widest_gap(found, expected)
    for what, each in (("ranks", ours), ("rounding", bounds)):
        shares = ", ".join(f"{share:.0%} {value:.4f}" for share, value in zip(SHARES, each, strict=True))
        print(f"logprobs differ by the {what}: {shares}")
    print(f"greedy answers part where two tokens are within {gap:.4f}", flush=True)
    return gap <= bounds[-1] and all(one <= bound for one, bound in zip(ours, bounds, strict=True))


def main() -> int:
    """Compare, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--way", choices=("tensor", "pipeline"), default="tensor")
    parser.add_argument("--form", help="form of the weights, as --quantization of rootgraft serve")
    parser.add_argument("--kv", default="auto", help="format of KV, as --kv-cache-dtype of rootgraft serve")
    args = parser.parse_args()
    is_rounded = args.kv == "int8"
    options = {"quantization": args.form, "kv_cache_dtype": args.kv, "logprobs": SCORES if is_rounded else None}
    with tempfile.TemporaryDirectory() as folder:
        names = write_adapters(Path(folder))
        expected, _ = answers(args.requests, Path(folder), names, **options)
        ranks = {f"{args.way}_parallel_size": args.ranks}
        found, counts = answers(args.requests, Path(folder), names, **options, **ranks)
        options["kv_cache_dtype"] = "auto"
        unrounded = answers(args.requests, Path(folder), names, **options)[0] if is_rounded else []
    same = sum(one[:2] == other[:2] for one, other in zip(found, expected, strict=True))
    print(f"{same} of {args.requests} answers of {args.ranks} ranks are those of one; {counts}", flush=True)
    if is_rounded:
        is_right = is_within_rounding(found, expected, unrounded)
    else:
        assert_same(found, expected)
        is_right = True
    return 0 if is_right and counts["prompt_tokens_cached"] and counts["draft_tokens"] else 1


if __name__ == "__main__":
    sys.exit(main())
