"""Cost of routing decisions in a large fleet, and where adapters go in a small one.

    python -m benchmarks.fleet.simulated.routing_cost [--replicas 1000] [--requests 100000]

The first table is of the processor time from a request's tokens to its replica, hash chain and bookkeeping included:
prompts of 64 to 4,096 tokens, of which many share a beginning. The second counts loads of 16 adapters, chosen by Zipf's
law, on four replicas. With four slots each there is no room for the most used one on two replicas, which an even load
takes: it has 30 % of the sequences. So the least used ones are loaded again and again; with a fifth slot they are not.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from collections import Counter, deque

import numpy as np

from rootgraft.engine.messages import Ready
from rootgraft.fleet.placement.prefix_chain import KvScope, prefix_chain
from rootgraft.fleet.placement.replica_table import ReplicaTable

READY = Ready(8192, 50_000, 4096, 16, ())


def decide(replicas: int, requests: int, seed: int = 0) -> list[float]:
    """Return the seconds of processor time of each decision."""
    draw = random.Random(seed)
    table = ReplicaTable(replicas, adapter_slots=4, adapter_load_seconds=0.5)
    for number in range(replicas):
        table.join(f"replica-{number}", READY, 0.0)
    stems = [array("i", [draw.randrange(50_000) for _ in range(draw.randint(64, 4000))]) for _ in range(200)]
    running: deque[tuple[str, int]] = deque()
    seconds = []
    for number in range(requests):
        stem = stems[min(int(draw.paretovariate(0.7)) - 1, 199)]
        tokens = stem + array("i", [draw.randrange(50_000) for _ in range(draw.randint(1, 96))])
        adapter = draw.choice((None, None, f"adapter-{min(int(draw.paretovariate(1.0)), 100)}"))
        began = time.thread_time()
        chain = prefix_chain(KvScope("base", adapter), tokens)
        info, route = table.choose(chain, len(tokens), adapter=adapter)
        assert info is not None
        table.place(info, number, chain, len(tokens) - route.num_cached, adapter)
        seconds.append(time.thread_time() - began)
        running.append((info.name, number))
        if len(running) > 4 * replicas:
            name, ended = running.popleft()
            table.ended(table.replicas[name], ended)
    return seconds


def place_adapters(adapters: int, replicas: int, slots: int, requests: int, seed: int = 0) -> tuple[float, float]:
    """Return the loads for each adapter, and the largest load of a replica over the mean."""
    draw = random.Random(seed)
    table = ReplicaTable(replicas, adapter_slots=slots, adapter_load_seconds=0.5)
    for number in range(replicas):
        table.join(f"replica-{number}", READY, 0.0)
    weights = [1 / rank for rank in range(1, adapters + 1)]
    work: Counter[str] = Counter()
    loads = 0
    running: deque[tuple[str, int]] = deque()
    for number in range(requests):
        [name] = draw.choices([f"adapter-{rank}" for rank in range(adapters)], weights)
        tokens = array("i", [draw.randrange(50_000) for _ in range(100)])
        chain = prefix_chain(KvScope("base", name), tokens)
        info, _ = table.choose(chain, len(tokens), adapter=name)
        assert info is not None
        loads += name not in info.adapters
        table.place(info, number, chain, len(tokens), name)
        table.begun(info, number)
        work[info.name] += 1
        running.append((info.name, number))
        if len(running) > 8 * replicas:
            ended, old = running.popleft()
            table.ended(table.replicas[ended], old)
    return loads / adapters, max(work.values()) / (sum(work.values()) / replicas)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    options = parser.parse_args()
    milliseconds = 1000 * np.array(decide(options.replicas, options.requests))
    p50, p99, p999 = np.percentile(milliseconds, (50, 99, 99.9))
    print(f"{options.replicas:,} replicas, {options.requests:,} requests, milliseconds of a decision:")
    print(f"p50 {p50:.3f}   p99 {p99:.3f}   p99.9 {p999:.3f}   most {milliseconds.max():.3f}")
    for slots in (4, 5, 6):
        loads, skew = zip(*(place_adapters(16, 4, slots, 3000, seed) for seed in range(5)), strict=True)
        print(f"16 adapters, 4 replicas of {slots} slots, 3,000 sequences: ", end="")
        print(f"at most {max(loads):.2f} loads an adapter, load max/mean {max(skew):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
