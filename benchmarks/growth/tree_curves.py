"""The prefix cache by the tokens in its tree: a prompt found or not, a page evicted, and a prompt put in its place."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import partial

from benchmarks.growth.curve import Curve
from benchmarks.prefix_cache import BASE, filled, median, put, put_nothing, tokens_of
from rootgraft.engine.kv_cache.prefix_cache import Lease, PrefixCache

TOKENS = (1_000, 10_000, 100_000, 1_000_000)
_PAGE, _LENGTH = 16, 496


def measure(quick: bool) -> list[Curve]:
    """Measure the curves of the tree."""
    sizes = (1_000, 4_000) if quick else TOKENS
    found, missed, evicted, entered = [], [], [], []
    for size in sizes:
        cache = filled(_PAGE, size, _LENGTH, tenants=1)
        known, fresh = tokens_of(_LENGTH, size // _LENGTH // 2), tokens_of(_LENGTH, 10**6)
        found.append(1e6 * median(partial(cache.match, BASE, known, _LENGTH), 200))
        missed.append(1e6 * median(partial(put_nothing, cache, fresh), 200))
        lease = cache.acquire(BASE, array("i"), 0)
        pages = iter(range(1, size // _PAGE))
        evicted.append(1e6 * median(partial(_grow, cache, lease, pages), 50))
        cache.release(lease, array("i"), 0)
        prompts = iter([tokens_of(_LENGTH, seed) for seed in range(10**6, 10**6 + 50)])
        entered.append(1e6 * median(partial(_put_next, cache, prompts), 50))
    label = "tokens in the tree"
    return [
        Curve("tree-match", "Prompt of 496 found, us", label, sizes, found, 0.0, "one lookup by hash at each branch"),
        Curve("tree-miss", "Prompt not found, us", label, sizes, missed, 0.0, "it differs at the root"),
        Curve("tree-evict", "A page evicted, us", label, sizes, evicted, 0.1, "the oldest leaf comes from a heap"),
        Curve(
            "tree-enter", "Prompt of 496 entered, us", label, sizes, entered, 0.1, "its pages were those of old leaves"
        ),
    ]


def _grow(cache: PrefixCache, lease: Lease, pages: Iterator[int]) -> None:
    cache.grow(lease, _PAGE * next(pages))


def _put_next(cache: PrefixCache, prompts: Iterator[array[int]]) -> None:
    put(cache, BASE, next(prompts))
