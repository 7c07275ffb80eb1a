"""Forgetting adapters: all salts of theirs, whether in the tree or held by leases, and nothing else."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats

from rootgraft.engine.kv_cache.prefix_cache import PrefixCache
from rootgraft.radix.namespace import Namespace, Path

BASE = Namespace("r")
TOKENS = array("i", range(11))


def lease_of(cache: PrefixCache, path: Path, tokens: array = TOKENS):
    """A lease on which all of the tokens are computed and committed."""
    lease = cache.acquire(path, tokens, len(tokens))
    lease.take_copy()
    assert cache.grow(lease, len(tokens))
    cache.commit(lease, tokens, len(tokens))
    return lease


def put(cache: PrefixCache, path: Path, tokens: array = TOKENS) -> None:
    cache.release(lease_of(cache, path, tokens), tokens, len(tokens))
    cache.check()


def found(cache: PrefixCache, path: Path, tokens: array = TOKENS) -> int:
    return cache.match(path, tokens, len(tokens))


def test_every_salt_goes_and_others_stay():
    cache = PrefixCache(64, 4)
    gone = [Path(Namespace("r", adapter, salt)) for adapter in ("a", "b") for salt in ("", "x", "a")]
    kept = [Path(BASE), Path(Namespace("r", None, "a")), Path(Namespace("r", "c")), Path(Namespace("r", "c", "a"))]
    for path in (*gone, *kept):
        put(cache, path)
    assert cache.drop_adapters({"a", "b"}) == 3 * len(gone)
    assert [found(cache, path) for path in gone] == [0] * len(gone)
    assert [found(cache, path) for path in kept] == [len(TOKENS)] * len(kept)
    assert cache.drop_adapters({"a", "b"}) == cache.drop_adapters(set()) == 0
    cache.check()


def test_of_an_activated_adapter_the_bases_part_stays():
    cache = PrefixCache(64, 4)
    for adapter in ("a", "b"):
        put(cache, Path(Namespace("r", adapter), 6, BASE))
    cache.drop_adapters({"a"})
    cache.check()
    assert found(cache, Path(Namespace("r", "a"), 6, BASE)) == found(cache, Path(BASE)) == 6
    assert found(cache, Path(Namespace("r", "b"), 6, BASE)) == len(TOKENS)


def test_what_only_a_lease_knows_is_forgotten_too():
    """A sequence that began before the drop and has nothing in the tree yet enters nothing when it ends."""
    cache = PrefixCache(64, 4)
    path = Path(Namespace("r", "a", "salt"))
    early, late = lease_of(cache, path), cache.acquire(path, array("i", [50, 51, 52, 53]), 4)
    assert cache.grow(late, 4)
    assert cache.drop_adapters({"a"}) == 0
    assert found(cache, path) == 0
    cache.release(early, TOKENS, len(TOKENS))
    cache.release(late, array("i", [50, 51, 52, 53]), 4)
    assert (cache.num_cached, cache.num_free) == (0, 64)
    cache.check()
    put(cache, path)
    assert found(cache, path) == len(TOKENS)


ADAPTERS = st.sampled_from([None, "a", "b", "c"])
PATHS = st.builds(
    lambda adapter, salt, at: (
        Path(Namespace("r", adapter, salt), at, Namespace("r", None, salt))
        if at and adapter
        else Path(Namespace("r", adapter, salt))
    ),
    ADAPTERS,
    st.sampled_from(["", "a", "x"]),
    st.integers(0, 9),
)
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda tokens: array("i", tokens))


@settings(max_examples=repeats(150))
@given(st.lists(st.tuples(PATHS, PROMPTS, st.booleans()), max_size=12), st.sets(st.sampled_from("abc")))
def test_whatever_is_there(entries, dropped):
    """Ordinary and activated, ended and running, in any order: the dropped are gone, the rest is as it was.

    A page in which an adapter was activated goes as a whole, so the base may lose what it found in that page.
    """
    cache = PrefixCache(200, 4)
    leases = []
    for path, tokens, runs in entries:
        if runs:
            leases.append((lease_of(cache, path, tokens), tokens))
        else:
            put(cache, path, tokens)
    before = [found(cache, path, tokens) for path, tokens, _ in entries]
    cache.drop_adapters(dropped)
    cache.check()
    for (path, tokens, _), count in zip(entries, before, strict=True):
        own = path.namespaces[-1]
        if own.adapter not in dropped:
            assert count - 4 < found(cache, path, tokens) <= count
        else:
            base = found(cache, Path(Namespace("r", None, own.salt)), tokens)
            assert found(cache, path, tokens) <= base
    for lease, tokens in leases:
        cache.release(lease, tokens, len(tokens))
        cache.check()
    for path, tokens, _ in entries:
        if path.namespaces[-1].adapter in dropped and len(path.namespaces) == 1:
            assert found(cache, path, tokens) == 0
