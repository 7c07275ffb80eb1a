"""Each rule of the prefix cache by itself, with page ids and counts spelled out."""

from array import array

import pytest

from rootgraft.engine.batch import PageCopy
from rootgraft.engine.kv_cache.prefix_cache import PrefixCache
from rootgraft.radix.invariants import BrokenInvariant
from rootgraft.radix.namespace import Namespace, Path

BASE = Namespace("r1")
ADAPTER = Namespace("r1", "a")
OTHER = Namespace("r1", "b")


def ids(*tokens: int) -> array:
    return array("i", tokens)


def run(cache: PrefixCache, path: Path, tokens: array, *, keep: int = 0):
    """Start, compute all of ``tokens`` and commit; the lease is still held."""
    lease = cache.acquire(path, tokens, keep)
    lease.take_copy()
    assert cache.grow(lease, len(tokens))
    cache.commit(lease, tokens, len(tokens))
    return lease


def put(cache: PrefixCache, path: Path, tokens: array) -> None:
    """Leave the KV of ``tokens`` in the cache."""
    cache.release(run(cache, path, tokens), tokens, len(tokens))
    cache.check()


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(16, 4)


TOKENS = ids(*range(10))


@pytest.mark.parametrize(
    "stranger",
    [
        Namespace("r2"),
        Namespace("r1", "a"),
        Namespace("r1", None, "a"),
        Namespace("r1", "a", "a"),
        Namespace("r1", "", ""),
    ],
)
def test_namespaces_never_share(cache, stranger):
    put(cache, Path(BASE), TOKENS)
    assert cache.match(Path(BASE), TOKENS, 10) == 10
    assert cache.match(Path(stranger), TOKENS, 10) == 0
    put(cache, Path(stranger), TOKENS)
    assert cache.num_cached == 6


def test_a_salt_is_not_the_adapter_of_the_same_name(cache):
    put(cache, Path(Namespace("r1", "a", "")), TOKENS)
    assert cache.match(Path(Namespace("r1", None, "a")), TOKENS, 10) == 0


@pytest.mark.parametrize("switch", range(1, 13))
@pytest.mark.parametrize("other_switch", range(1, 13))
def test_two_switches_share_exactly_what_both_left_to_the_base(cache, switch, other_switch):
    put(cache, Path(ADAPTER, switch, BASE), TOKENS)
    shared = 10 if switch == other_switch else min(switch, other_switch, 10)
    assert cache.match(Path(ADAPTER, other_switch, BASE), TOKENS, 10) == shared
    assert cache.match(Path(OTHER, other_switch, BASE), TOKENS, 10) == min(switch, other_switch, 10)
    assert cache.match(Path(BASE), TOKENS, 10) == min(switch, 10)
    assert cache.match(Path(ADAPTER), TOKENS, 10) == 0


@pytest.mark.parametrize("switch", range(1, 13))
def test_a_switch_goes_on_from_the_base_and_not_from_the_adapter(cache, switch):
    put(cache, Path(BASE), TOKENS)
    put(cache, Path(ADAPTER), TOKENS)
    assert cache.match(Path(ADAPTER, switch, BASE), TOKENS, 10) == min(switch, 10)


def test_the_namespace_before_a_switch_in_the_first_page_counts(cache):
    put(cache, Path(ADAPTER, 3, BASE), TOKENS)
    assert cache.match(Path(ADAPTER, 3, Namespace("r1", None, "tenant")), TOKENS, 10) == 0


@pytest.mark.parametrize("agreeing", range(11))
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_reuse_is_exact_to_the_token(page_size, agreeing):
    cache = PrefixCache(32, page_size)
    put(cache, Path(BASE), TOKENS)
    tokens = TOKENS[:agreeing] + ids(*[99] * 10)
    lease = cache.acquire(Path(BASE), tokens, len(tokens))
    assert lease.num_tokens == agreeing
    assert lease.num_shared == agreeing // page_size
    assert (lease.copy.num_tokens if lease.copy else 0) == agreeing % page_size


@pytest.mark.parametrize("limit", range(11))
def test_no_more_than_the_limit_is_reused(cache, limit):
    put(cache, Path(BASE), TOKENS)
    lease = cache.acquire(Path(BASE), TOKENS, limit)
    assert lease.num_tokens == cache.match(Path(BASE), TOKENS, limit) == limit


def test_a_partial_page_is_copied_from_the_sibling_with_most_tokens(cache):
    for tokens in (ids(1, 2, 3, 9), ids(1, 2, 3, 4), ids(1, 7, 7, 7)):
        put(cache, Path(BASE), tokens)
    lease = cache.acquire(Path(BASE), ids(1, 7, 7, 8), 4)
    assert lease.copy == PageCopy(source=2, target=lease.pages[0], num_tokens=3)


def test_duplicates_are_swapped_for_the_trees_pages_and_reported(cache):
    first, second = (cache.acquire(Path(BASE), TOKENS, 0) for _ in range(2))
    for lease in (first, second):
        assert cache.grow(lease, 10)
        assert lease.take_changes() == (0, tuple(lease.pages))
    cache.commit(first, TOKENS, 10)
    assert first.take_changes() == (3, ())
    own = list(second.pages)
    cache.commit(second, TOKENS, 10)
    assert second.pages == [*first.pages[:2], own[2]]
    assert second.take_changes() == (0, tuple(second.pages))
    assert cache.num_free == 16 - 4
    cache.check()


def test_changes_begin_at_the_first_page_that_changed(cache):
    put(cache, Path(BASE), TOKENS[:4])
    lease = cache.acquire(Path(BASE), TOKENS, 4)
    assert lease.take_changes() == (0, (0,))
    assert cache.grow(lease, 5)
    assert cache.grow(lease, 12)
    assert lease.take_changes() == (1, tuple(lease.pages[1:]))
    assert cache.grow(lease, 12)
    assert lease.take_changes() == (3, ())


def test_grow_changes_nothing_if_pages_are_short():
    cache = PrefixCache(4, 4)
    held = run(cache, Path(BASE), TOKENS[:8])
    lease = cache.acquire(Path(ADAPTER), TOKENS, 10)
    assert not cache.grow(lease, 12)
    assert (lease.pages, cache.num_free, cache.available()) == ([], 2, 2)
    assert cache.grow(lease, 8)
    assert cache.num_evicted == 0
    cache.release(held, TOKENS[:8], 8)
    assert cache.grow(lease, 12)
    assert cache.num_evicted == 1
    assert cache.match(Path(BASE), TOKENS, 10) == 4
    cache.check()


def test_a_copy_that_finds_no_page_falls_back_to_whole_pages():
    cache = PrefixCache(2, 4)
    run(cache, Path(BASE), TOKENS[:8])
    lease = cache.acquire(Path(BASE), ids(0, 1, 2, 3, 4, 5, 9), 7)
    assert (lease.num_tokens, lease.copy, lease.pages) == (4, None, [0])


def test_the_last_page_is_taken_over_where_it_is_its_own_source():
    cache = PrefixCache(1, 4)
    put(cache, Path(BASE), ids(1, 2, 3))
    lease = cache.acquire(Path(BASE), ids(1, 2, 9), 3)
    assert (lease.num_tokens, lease.copy, lease.pages) == (2, None, [0])
    assert cache.num_private == 1
    cache.check()


@pytest.mark.parametrize("num_computed", [2, 3, 7, 8])
def test_a_lease_given_up_before_its_copy_enters_nothing(cache, num_computed):
    put(cache, Path(BASE), ids(1, 2, 3))
    tokens = ids(1, 2, 9, 9, 9, 9, 9, 9)
    lease = cache.acquire(Path(BASE), tokens, 8)
    assert cache.grow(lease, 8)
    cache._allocator.free(cache._tree.evict(1))
    cache.release(lease, tokens, num_computed)
    assert (cache.num_cached, cache.num_private, cache.num_free) == (0, 0, 16)
    cache.check()


def test_commit_before_the_copy_is_refused(cache):
    put(cache, Path(BASE), ids(1, 2, 3))
    lease = cache.acquire(Path(BASE), ids(1, 2, 9), 3)
    with pytest.raises(ValueError, match="before the lease's copy was taken"):
        cache.commit(lease, ids(1, 2, 9), 2)


def test_a_longer_tail_replaces_a_shorter_one_and_a_whole_page_both(cache):
    for length in (1, 3, 2, 4):
        put(cache, Path(BASE), TOKENS[:length])
        assert cache.num_cached == 1
    assert cache.match(Path(BASE), TOKENS, 10) == 4


def test_preemption_loses_nothing(cache):
    lease = run(cache, Path(BASE), TOKENS)
    cache.release(lease, TOKENS, 10)
    resumed = cache.acquire(Path(BASE), TOKENS, 9)
    assert resumed.num_tokens == 9


def test_only_what_was_computed_is_entered(cache):
    lease = cache.acquire(Path(BASE), TOKENS, 0)
    assert cache.grow(lease, 10)
    cache.release(lease, TOKENS, 6)
    assert cache.match(Path(BASE), TOKENS, 10) == 6
    assert cache.num_cached == 2


def test_releasing_twice_is_an_error(cache):
    lease = run(cache, Path(BASE), TOKENS)
    cache.release(lease, TOKENS, 10)
    for call in (cache.release, cache.commit):
        with pytest.raises(ValueError, match="was released before"):
            call(lease, TOKENS, 10)
    with pytest.raises(ValueError, match="was released before"):
        cache.grow(lease, 20)


def test_counts_without_backing_are_refused(cache):
    lease = cache.acquire(Path(BASE), TOKENS, 0)
    assert cache.grow(lease, 4)
    with pytest.raises(ValueError, match="num_computed is 5, but there are 10 tokens and 1 pages of 4"):
        cache.commit(lease, TOKENS, 5)
    with pytest.raises(ValueError, match="num_computed is -1"):
        cache.release(lease, TOKENS, -1)


def test_tokens_of_another_width_are_refused(cache):
    with pytest.raises(ValueError, match=r"array\('i'\)"):
        cache.match(Path(BASE), array("q", [1, 2]), 2)


def test_locked_pages_are_never_evicted():
    cache = PrefixCache(4, 4)
    held = run(cache, Path(BASE), TOKENS[:8])
    put(cache, Path(ADAPTER), TOKENS[:8])
    lease = cache.acquire(Path(OTHER), TOKENS, 0)
    assert cache.available() == 2
    assert cache.grow(lease, 8)
    assert cache.match(Path(BASE), TOKENS, 8) == 8
    assert cache.match(Path(ADAPTER), TOKENS, 8) == 0
    assert not cache.grow(lease, 9)
    assert held.pages == [0, 1]
    cache.check()


def test_drop_forgets_a_namespace_and_spares_the_rest(cache):
    put(cache, Path(BASE), TOKENS)
    put(cache, Path(ADAPTER), TOKENS)
    put(cache, Path(ADAPTER, 5, BASE), TOKENS)
    put(cache, Path(OTHER, 5, BASE), TOKENS)
    assert cache.drop(ADAPTER) == 3 + 2
    assert cache.match(Path(ADAPTER), TOKENS, 10) == 0
    assert cache.match(Path(ADAPTER, 5, BASE), TOKENS, 10) == 5
    assert cache.match(Path(OTHER, 5, BASE), TOKENS, 10) == 10
    cache.check()
    assert cache.drop(BASE) == 3 + 2
    assert (cache.num_cached, cache.drop(BASE)) == (0, 0)


def test_drop_of_what_runs_takes_effect_at_once_for_others_and_at_release_for_pages(cache):
    lease = run(cache, Path(ADAPTER), TOKENS)
    assert cache.drop(ADAPTER) == 0
    assert cache.match(Path(ADAPTER), TOKENS, 10) == 0
    assert (cache.num_cached, cache.num_private) == (2, 1)
    cache.check()
    assert cache.grow(lease, 16)
    tokens = TOKENS + ids(*range(6))
    cache.commit(lease, tokens, 16)
    assert cache.num_cached == 2
    cache.release(lease, tokens, 16)
    assert (cache.num_cached, cache.num_free) == (0, 16)
    cache.check()


def test_a_sequence_that_had_nothing_in_the_tree_yet_enters_nothing_after_a_drop(cache):
    lease = cache.acquire(Path(ADAPTER, 4, BASE), TOKENS, 10)
    assert cache.grow(lease, 10)
    cache.drop(ADAPTER)
    cache.commit(lease, TOKENS, 10)
    cache.release(lease, TOKENS, 10)
    assert cache.num_cached == 0
    cache.check()


def test_a_drop_of_what_lies_before_a_switch_ends_sharing_too(cache):
    lease = cache.acquire(Path(ADAPTER, 4, BASE), TOKENS, 10)
    assert cache.grow(lease, 10)
    cache.drop(BASE)
    cache.release(lease, TOKENS, 10)
    assert cache.num_cached == 0
    cache.check()


def test_the_parent_of_a_dropped_lease_can_be_evicted_after_it():
    cache = PrefixCache(3, 4)
    lease = run(cache, Path(ADAPTER, 4, BASE), TOKENS[:8])
    cache.drop(ADAPTER)
    cache.release(lease, TOKENS[:8], 8)
    cache.check()
    other = cache.acquire(Path(OTHER), TOKENS, 0)
    assert cache.grow(other, 12)


def test_without_sharing_nothing_is_found_or_kept():
    cache = PrefixCache(16, 4, sharing=False)
    put(cache, Path(BASE), TOKENS)
    lease = run(cache, Path(BASE), TOKENS, keep=10)
    assert (lease.num_tokens, cache.num_cached, cache.num_private) == (0, 0, 3)
    cache.release(lease, TOKENS, 10)
    assert cache.num_free == 16
    cache.check()


def test_a_lost_page_is_reported_with_all_terms(cache):
    lease = run(cache, Path(BASE), TOKENS)
    lost = lease.pages.pop()
    with pytest.raises(BrokenInvariant, match=rf"free 13 \+ in tree 2 \+ private 0 != total 16.*by nobody: \[{lost}\]"):
        cache.check()


def test_a_page_owned_twice_is_reported(cache):
    lease = run(cache, Path(BASE), TOKENS)
    lease.pages.append(lease.pages[0])
    with pytest.raises(BrokenInvariant, match=r"owned twice: \[0\]"):
        cache.check()


def test_what_came_next_is_read_off_the_own_path(cache):
    put(cache, Path(BASE), TOKENS)
    lease = run(cache, Path(BASE), ids(0, 1, 2, 3))
    assert cache.following(lease, ids(0, 1, 2, 3), 9) == ids(4, 5, 6, 7, 8, 9)
    assert cache.following(lease, ids(0, 1, 2, 3, 4, 5), 3) == ids(6, 7, 8)
    assert cache.following(lease, ids(0, 1, 2, 3, 4, 6), 3) == ids()
    assert cache.following(lease, ids(*range(9)), 3) == ids()  # the lease is a page and more behind
    other = run(cache, Path(OTHER), ids(0, 1, 2, 3))
    assert cache.following(other, ids(0, 1, 2, 3), 9) == ids()


def test_of_several_ways_to_go_on_the_last_one_used_is_named(cache):
    for end in (7, 5, 6):
        put(cache, Path(BASE), ids(0, 1, 2, 3, 4, end, 8, 9))
    lease = run(cache, Path(BASE), ids(0, 1, 2, 3))
    assert cache.following(lease, ids(0, 1, 2, 3), 9) == ids(4, 6, 8, 9)


def test_pages_behind_the_last_token_can_be_given_back(cache):
    lease = run(cache, Path(BASE), TOKENS)
    lease.take_changes()
    assert cache.grow(lease, 16)
    first, pages = lease.take_changes()
    assert (first, len(pages)) == (3, 1)
    cache.shrink(lease, 10)
    assert len(lease.pages) == 3 and lease.take_changes() == (3, ())
    cache.shrink(lease, 0)
    assert len(lease.pages) == lease.num_shared == 2 and lease.take_changes() == (2, ())
    cache.check()
