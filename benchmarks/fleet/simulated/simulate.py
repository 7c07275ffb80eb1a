"""Simulate a fleet on a fake clock: kills, partitions, slow replicas, frames that are repeated and overtake each other.

    python -m benchmarks.fleet.simulated.simulate [--seeds 10000] [--first 0]

Each seed is 40 seconds of requests to up to five replicas, one of which is lost every few seconds; see ``simulation``.
Of each sequence it is checked that it ends once, with exactly the tokens of one undisturbed replica of one version; of
the journal that it stays within its memory and is empty at the end; of a request that kills its replicas that it is
given up. Exit code 1 if anything is violated, or if more than one other sequence in a thousand happened to lose three
replicas in a row before it had a token, and was given up too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from benchmarks.fleet.simulated.simulation import simulate

MOST_UNLUCKY = 1 / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    violations, began = 0, time.monotonic()
    for seed in range(options.first, options.first + options.seeds):
        try:
            counts += simulate(seed)
        except AssertionError as error:
            violations += 1
            print(f"VIOLATED: {error}", flush=True)
    print(", ".join(f"{name} {number:,}" for name, number in sorted(counts.items())))
    print(f"{options.seeds:,} seeds, {violations} violated, {time.monotonic() - began:.0f} s")
    return int(violations > 0 or counts["unlucky"] > MOST_UNLUCKY * counts["whole"])


if __name__ == "__main__":
    sys.exit(main())
