"""Do three ranks of the real model answer 200 mixed requests as one does?

    PYTHONPATH=tests python -m benchmarks.rank_answers [--requests 200] [--ranks 3] [--way tensor|pipeline]

The model is SmolLM2-135M-Instruct in Q4_1, whose 9 heads and 3 KV heads three ranks divide. Its blocks stay as they
are, and numbers are float32. The requests share prefixes, draw, follow schemas, ask for logprobs and push one another
out of a small pool; each rank has one thread. Exit code 1 if a token, an end or, by more than 0.01, a logprob differs.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from support.engine.mixed_answers import Answered, assert_same, mixed_answers

from rootgraft import LLM

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 40,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
}


def answers(count: int, **ranks: int) -> list[Answered]:
    """Answer the requests by a model of some ranks."""
    llm = LLM(**OPTIONS, **ranks)
    try:
        return mixed_answers(llm, count=count)
    finally:
        llm.close()


def main() -> int:
    """Compare, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--way", choices=("tensor", "pipeline"), default="tensor")
    args = parser.parse_args()
    expected = answers(args.requests)
    found = answers(args.requests, **{f"{args.way}_parallel_size": args.ranks})
    same = sum(one[:2] == other[:2] for one, other in zip(found, expected, strict=True))
    print(f"{same} of {args.requests} answers of {args.ranks} ranks are those of one", flush=True)
    assert_same(found, expected)
    return 0


if __name__ == "__main__":
    sys.exit(main())
