"""Random requests in a cramped engine, each against the same request alone: tokens, logprobs and ends, bit for bit.

    python -m benchmarks.fuzz [--seed N] [--requests 2000] [--minutes M] [--fake] [--tiers]

Each *world* is an engine with options drawn from the seed: model family, types of weights and KV, page size, few pages
and rows, small steps, drafts, steps planned ahead, fewer adapter slots than adapters. Its requests are drawn too, with
shared prefixes, adapters, grammars, penalties, seeds, scored prompts, several answers; some are aborted. After each
step every equation of cache, adapters and slots is checked. The engine in which each request is alone has no prefix
cache, no drafts, room for all and no recorded passes.

With ``--fake`` the worlds are over the tests' device of integers, which computes no model: the control plane alone,
some ten times as many requests in the same time, and beside all of the above recurrent states, longrope, a draft model,
a target inter-token latency, adapters replaced under their name, clocks that jump and sudden evictions.

With ``--tiers`` pages also move to host memory and files, where there is room for a few, and back; reads and writes of
the files fail as disks fail, and the tiers begin anew in the middle of a world.

Where a world fails, it is run again with fewer and fewer requests; the seed and the last ones that still fail are
printed as a command. Exit code 1 then.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.fuzzing.fake_fuzzer import FakeFuzzer
from benchmarks.fuzzing.fuzzer import OF_A_WORLD, Fuzzer, fuzz, report
from benchmarks.fuzzing.tiered_fuzzer import TieredFakeFuzzer, TieredModelFuzzer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="by default a random seed, which is printed")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after the world that runs at this time"
    )
    parser.add_argument("--world", help="run one world by its seed, such as 17.3")
    parser.add_argument(
        "--only", help="requests of that world, such as 4,17", type=lambda text: [*map(int, text.split(","))]
    )
    parser.add_argument("--fake", action="store_true", help="worlds over the fake device")
    parser.add_argument("--tiers", action="store_true", help="with tiers of KV for few pages, over a disk that fails")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        plain, tiered = (FakeFuzzer, TieredFakeFuzzer) if options.fake else (Fuzzer, TieredModelFuzzer)
        fuzzer = (tiered if options.tiers else plain)(Path(folder))
        if options.world:
            wrong = fuzzer.check_world(options.world, options.only or range(OF_A_WORLD))
            print(wrong or "nothing is wrong")
            return int(wrong is not None)
        print(f"seed {seed}")
        for name, wrong in fuzz(fuzzer, seed, options.requests, time.monotonic() + 60 * options.minutes):
            print(f"{name}: {fuzzer.draw_world(name)}: {'WRONG' if wrong else 'right'}", flush=True)
            if wrong:
                print(report(fuzzer, name, wrong))
                return 1
        print(", ".join(f"{name} {number:,}" for name, number in fuzzer.counts.items()))
        fuzzer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
