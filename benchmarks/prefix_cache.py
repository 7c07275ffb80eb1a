"""Measure the cost of the prefix cache: ``python -m benchmarks.prefix_cache``. No model, no torch, one core.

Each figure is the median over repetitions. A step of the engine pays one ``commit`` for each running sequence, an
admission one ``acquire``, an end one ``release``; so these have to vanish beside a step of some milliseconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from collections.abc import Callable

from rootgraft.engine.kv_cache.prefix_cache import PrefixCache
from rootgraft.radix.namespace import Namespace, Path

BASE = Path(Namespace("r1"))
LONG = 100_000
Prepared = tuple[Callable[[], object], Callable[[], object]]


def tokens_of(length: int, seed: int) -> array[int]:
    """Random token ids below 128,000."""
    draw = random.Random(seed)
    return array("i", (draw.randrange(128_000) for _ in range(length)))


def put(cache: PrefixCache, path: Path, tokens: array[int]) -> None:
    """Leave ``tokens`` in the cache."""
    lease = cache.acquire(path, tokens, len(tokens))
    lease.take_copy()
    if not cache.grow(lease, len(tokens)):
        raise RuntimeError(f"{len(tokens)} tokens do not fit beside {cache.num_cached} pages")
    cache.release(lease, tokens, len(tokens))


def filled(page_size: int, num_tokens: int, length: int, tenants: int) -> PrefixCache:
    """A cache full of sequences of ``length`` tokens that share nothing, of so many tenants in turn."""
    cache = PrefixCache(num_tokens // page_size, page_size)
    for seed in range(num_tokens // length):
        put(cache, Path(Namespace("r1", tenant=str(seed % tenants))), tokens_of(length, seed))
    return cache


def median(call: Callable[[], object], repetitions: int = 25) -> float:
    """Median seconds of one call."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def report(what: str, seconds: float) -> None:
    """One line, in microseconds."""
    print(f"  {what:<72}{seconds * 1e6:>12,.1f} us", flush=True)


def long_prompt(page_size: int) -> None:
    """A prompt of 100,000 tokens that is cached to its end, found and held again."""
    print(f"prompt of {LONG:,} tokens, pages of {page_size}")
    cache = PrefixCache(2 * LONG // page_size, page_size)
    tokens = tokens_of(LONG, 0)
    put(cache, BASE, tokens)

    def again() -> None:
        lease = cache.acquire(BASE, tokens, LONG - 1)
        lease.take_copy()
        cache.release(lease, tokens, LONG - 1)

    report("match, cached as one run", median(lambda: cache.match(BASE, tokens, LONG)))
    report("acquire and release of all but the last token", median(again))
    for cut in range(1000, LONG, 1000):
        branch = tokens[:cut]
        branch.append(-1)
        put(cache, BASE, branch)
    report("match, cached in 100 runs with a branch after each", median(lambda: cache.match(BASE, tokens, LONG)))
    switch = Path(Namespace("r1", "adapter"), LONG // 2 + 1, BASE.namespace)
    report("match of its first half before a switch", median(lambda: cache.match(switch, tokens, LONG)))
    strange = array("i", tokens)
    strange[LONG // 2] = -1
    report("match of a prompt that differs in the middle", median(lambda: cache.match(BASE, strange, LONG)))


def running_sequence(page_size: int) -> None:
    """Return the cost for a long sequence while it is computed."""
    print(f"running sequence of {LONG:,} tokens, pages of {page_size}")
    cache = PrefixCache(2 * LONG // page_size, page_size)
    tokens = tokens_of(2 * LONG, 0)
    lease = cache.acquire(BASE, tokens, 0)
    report("grow by all tokens", median(lambda: cache.grow(lease, LONG), 1))
    report("commit of all tokens", median(lambda: cache.commit(lease, tokens, LONG), 1))
    state = [LONG]

    def step(by: int) -> None:
        state[0] += by
        cache.grow(lease, state[0])
        cache.commit(lease, tokens, state[0])
        lease.take_changes()

    report("grow and commit of a page", median(lambda: step(page_size), 200))
    report("grow and commit of a token", median(lambda: step(1), 1000))
    twin = cache.acquire(BASE, tokens, 0)
    cache.grow(twin, LONG // 2)
    report(
        "commit of half of it by a second one, all duplicates", median(lambda: cache.commit(twin, tokens, LONG // 2), 1)
    )


def eviction(page_size: int, length: int, tenants: int = 1) -> None:
    """Eviction in a full tree of a million tokens."""
    cache = filled(page_size, 1_000_000, length, tenants)
    print(f"full tree of 1,000,000 tokens in sequences of {length}, pages of {page_size}, tenants: {tenants}")
    lease = cache.acquire(BASE, array("i"), 0)
    state = [0]

    def grow(by: int) -> None:
        state[0] += by * page_size
        if not cache.grow(lease, state[0]):
            raise RuntimeError("the tree is empty")

    report("evict and allocate one page", median(lambda: grow(1), 1000))
    report("evict and allocate 64 pages", median(lambda: grow(64), 25))
    fresh = tokens_of(length, 10**6)
    report("match that finds nothing", median(lambda: cache.match(BASE, fresh, length), 200))
    report("acquire and release that find nothing", median(lambda: put_nothing(cache, fresh), 200))


def put_nothing(cache: PrefixCache, tokens: array[int]) -> None:
    """A lease that computes nothing."""
    lease = cache.acquire(BASE, tokens, len(tokens))
    lease.take_copy()
    cache.release(lease, tokens, lease.num_tokens)


def siblings(page_size: int, count: int) -> None:
    """Many short branches from one shared prompt: what a system prompt and many users make."""
    shared = tokens_of(1000 // page_size * page_size, 0)
    cache = PrefixCache(count * 2 + len(shared) // page_size + 16, page_size)
    prompts = [shared + tokens_of(page_size + 1, seed) for seed in range(1, count + 1)]
    for prompt in prompts:
        put(cache, BASE, prompt)
    print(f"{count:,} branches below one prompt of {len(shared)} tokens, pages of {page_size}")
    prompt = prompts[count // 2]
    report("match of one of them", median(lambda: cache.match(BASE, prompt, len(prompt)), 200))
    fresh = iter([shared + tokens_of(page_size + 1, seed) for seed in range(-300, 0)])
    report("a new branch, evicting the oldest", median(lambda: put(cache, BASE, next(fresh)), 300))
    start = time.perf_counter()
    cache.check()
    report("check of everything", time.perf_counter() - start)


def dropping(page_size: int, adapters: int) -> None:
    """Unloading an adapter leaves all others alone and does not search the tree."""
    shared = tokens_of(1000, 0)
    cache = PrefixCache((adapters + 1) * 1000 // page_size, page_size)
    paths = [Path(Namespace("r1", f"adapter-{i}"), 500, BASE.namespace) for i in range(adapters)]
    for path in paths:
        put(cache, path, shared)
    print(f"{adapters} adapters activated in one prompt of 1000 tokens, pages of {page_size}")
    report(
        "match of another adapter",
        median(lambda: cache.match(Path(Namespace("r1", "new"), 500, BASE.namespace), shared, 999)),
    )
    waiting = iter(paths)
    report("drop of an adapter", median(lambda: cache.drop(next(waiting).namespace), 50))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--page-sizes", type=int, nargs="+", default=[16, 1], help="tokens in a page")
    for page_size in arguments.parse_args().page_sizes:
        long_prompt(page_size)
        running_sequence(page_size)
        eviction(page_size, 2000)
        eviction(page_size, 64)
        eviction(page_size, 2000, tenants=100)
        siblings(page_size, 10_000)
        dropping(page_size, 200)


if __name__ == "__main__":
    main()
