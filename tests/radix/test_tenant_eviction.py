"""Shares of tenants: whose leaf goes first, and that nobody who keeps to an equal share loses anything."""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats

from rootgraft.radix.invariants import check
from rootgraft.radix.namespace import Namespace, Path
from rootgraft.radix.node import Node
from rootgraft.radix.soft_pins import PinKind, SoftPin
from rootgraft.radix.tenant_eviction import IDLE_SECONDS
from rootgraft.radix.tree import RadixTree


def path_of(tenant: str, adapter: str | None = None) -> Path:
    return Path(Namespace("r1", adapter, tenant=tenant))


class World:
    """A tree with a page for each token, whose pages say whose they are, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tree = RadixTree(1, lambda: self.now)
        self._fresh = count()
        self._owners: dict[int, str] = {}
        self._leases: list[Node] = []

    def put(self, tenant: str, num_pages: int, adapter: str | None = None) -> bytes:
        """Leave a sequence that shares nothing with others. Returns its tokens."""
        tokens = array("i", (next(self._fresh) for _ in range(num_pages))).tobytes()
        self.tree.unlock(self.enter(path_of(tenant, adapter), tokens))
        self.check()
        return tokens

    def enter(self, path: Path, tokens: bytes) -> Node:
        """The lease of a sequence that is computed."""
        pages = array("i", tokens).tolist()
        self._owners.update(dict.fromkeys(pages, path.namespace.tenant))
        return self.tree.extend(self.tree.lock(self.tree.match(path, b"")), path, 0, tokens, pages).node

    def lease(self, path: Path, tokens: bytes) -> Node:
        self._leases.append(self.tree.lock(self.tree.match(path, tokens)))
        return self._leases[-1]

    def end(self, lease: Node) -> None:
        self._leases.remove(lease)
        self.tree.unlock(lease)
        self.check()

    def hold(self, tenant: str, tokens: bytes, kind: PinKind) -> SoftPin | None:
        return self.tree.pin(self.tree.match(path_of(tenant), tokens), kind)

    def evict(self, num_pages: int = 1) -> str:
        """The tenants that have lost pages, in order."""
        return "".join(self._owners[page] for page in self.tree.evict(num_pages))

    def found(self, tenant: str, tokens: bytes) -> int:
        return len(self.tree.match(path_of(tenant), tokens).pages)

    def check(self) -> None:
        check(self.tree, self._leases)


@pytest.fixture
def world() -> World:
    return World()


def test_the_tenant_with_most_pages_loses_them_until_another_has_as_many(world):
    world.put("a", 2)
    world.put("b", 4)
    assert world.evict(2) == "bb"
    assert sorted(world.evict(2)) == ["a", "b"]
    assert sorted(world.evict(9)) == ["a", "b"]
    assert world.evict() == "" and world.tree.num_pages == 0


def test_one_long_leaf_does_not_go_at_once_where_two_have_nearly_the_same(world):
    old = world.put("a", 10)
    world.put("b", 9)
    world.put("b", 1)
    assert sorted(world.evict(10)) == ["a"] * 5 + ["b"] * 5
    assert world.found("a", old) == 5


def test_a_tenant_alone_has_all_of_it_in_the_order_of_use(world):
    first, *_ = (world.put("a", 2, adapter) for adapter in (None, "x", "y"))
    world.end(world.lease(path_of("a"), first))
    assert world.tree.evict(4) == [2, 3, 4, 5] and world.found("a", first) == 2


@settings(max_examples=20)
@given(st.lists(st.integers(0, 39), min_size=200, max_size=300))
def test_the_least_recently_used_goes_first_however_often_leaves_are_used_again(uses):
    """Entries that have gone stale are dropped from the queue meanwhile."""
    world = World()
    prompts: dict[int, bytes] = {}  # in the order of use

    def evict_oldest():
        oldest = prompts.pop(next(iter(prompts)))
        assert world.tree.evict(1) == array("i", oldest).tolist()

    for step, number in enumerate(uses):
        if tokens := prompts.pop(number, None):
            world.tree.unlock(world.tree.lock(world.tree.match(path_of("a"), tokens)))
        prompts[number] = tokens or world.put("a", 1)
        if step % 5 == 4:
            evict_oldest()
    while prompts:
        evict_oldest()


def test_adapters_of_a_tenant_share_what_is_its_own(world):
    for adapter in ("x", "y", "z"):
        world.put("a", 2, adapter)
    kept = world.put("b", 5)
    assert world.evict(1) == "a"
    assert world.found("b", kept) == 5 and world.tree.tenant_eviction.num_pages() == {"a": 5, "b": 5}


def test_who_is_idle_has_no_share(world):
    world.put("a", 2)
    world.put("b", 3)
    world.now = IDLE_SECONDS + 1
    kept = world.put("c", 9)
    assert sorted(world.evict(5)) == ["a", "a", "b", "b", "b"]
    assert world.found("c", kept) == 9 and world.evict() == "c"


@pytest.mark.parametrize("how", ["nothing", "finds", "ends", "enters"])
def test_who_comes_back_has_it_again(world, how):
    kept = world.put("a", 2)
    lease = world.lease(path_of("a"), kept) if how == "ends" else None
    world.now = IDLE_SECONDS + 1
    world.put("b", 4)
    if lease:
        world.end(lease)
    elif how == "finds":
        world.end(world.lease(path_of("a"), kept))
    elif how == "enters":
        world.put("a", 1)
    assert world.evict() == ("a" if how == "nothing" else "b")
    world.check()


def test_a_session_delays_its_tenants_pages_among_its_own_alone(world):
    held = world.put("a", 3)
    world.put("a", 3)
    kept = world.put("b", 2)
    world.hold("a", held, PinKind.SESSION)
    world.check()
    assert world.evict(3) == "aaa" and world.found("a", held) == 3
    assert world.evict() == "a" and world.found("a", held) == 2 and world.found("b", kept) == 2


def test_pins_of_all_tenants_go_last(world):
    pinned = world.put("a", 4)
    world.put("a", 1)
    world.put("b", 2)
    hold = world.hold("a", pinned, PinKind.PIN)
    assert world.evict(3) == "abb" and world.found("a", pinned) == 4
    assert world.evict(1) == "a"
    world.check()
    world.tree.unpin(hold)
    world.put("b", 2)
    assert world.evict(1) == "a"
    world.check()


def test_what_runs_is_left_alone_and_somebody_else_pays(world):
    running = world.put("a", 8)
    lease = world.lease(path_of("a"), running)
    world.put("b", 3)
    world.put("c", 2)
    assert sorted(world.evict(9)) == ["b", "b", "b", "c", "c"] and world.evict() == ""
    world.end(lease)
    assert world.evict(9) == "a" * 8


def test_a_namespace_that_is_dropped_is_no_longer_counted(world):
    world.put("a", 3, "x")
    running = world.put("a", 2, "x")
    lease = world.lease(path_of("a", "x"), running)
    world.put("b", 4)
    world.tree.drop(Namespace("r1", "x", tenant="a"))
    assert world.tree.tenant_eviction.num_pages() == {"a": 2, "b": 4}
    world.check()
    world.end(lease)
    assert world.tree.tenant_eviction.num_pages() == {"b": 4}
    assert world.evict(9) == "bbbb"
    world.check()


def test_the_order_stays_as_small_as_the_tenants_are_many(world):
    for _ in range(300):
        for tenant in "abc":
            world.put(tenant, 2)
        world.evict(5)
        world.evict(1)
    assert len(world.tree.tenant_eviction._order) < 100
    world.evict(9999)
    world.check()
    assert not world.tree.tenant_eviction._shares and not world.tree.tenant_eviction._active


@given(st.lists(st.integers(1, 20), min_size=2, max_size=6), st.integers(1, 60))
def test_many_pages_at_once_are_taken_from_whoever_has_the_most_as_one_by_one(sizes, num_pages):
    world, left = World(), dict(zip("abcdef", sizes, strict=False))
    for tenant, size in left.items():
        world.put(tenant, size)
    lost = Counter(world.evict(num_pages))
    assert lost.total() == min(num_pages, sum(sizes))
    left = {tenant: size - lost[tenant] for tenant, size in left.items()}
    assert all(left[tenant] >= max(left.values()) - 1 for tenant in lost)


@settings(max_examples=repeats(100))
@given(st.data())
def test_who_has_no_more_than_an_equal_share_loses_nothing(data):
    """Some tenants come back to what they have, others ask for ever new things, for as long as the pool is full."""
    pool = data.draw(st.integers(8, 60), "pages")
    others = data.draw(st.integers(1, 3), "tenants that flood")
    kept_by = data.draw(st.integers(1, 3), "tenants that come back")
    longest = data.draw(st.integers(1, 4), "pages of a new prompt")
    most = (pool - longest) // (others + kept_by)
    world = World()
    sizes = {name: data.draw(st.integers(0, most), name) for name in "xyz"[:kept_by]}
    kept = {name: world.put(name, size) for name, size in sizes.items() if size}
    floods = st.tuples(st.sampled_from("abc"[:others]), st.integers(1, longest), st.sampled_from([None, "p", "q"]))
    for tenant, size, adapter in data.draw(st.lists(floods, min_size=20, max_size=60), "flood"):
        missing = world.tree.num_pages + size - pool
        if missing > 0:
            assert len(world.evict(missing)) == missing
        tokens = world.put(tenant, size, adapter)
        if data.draw(st.booleans()):
            world.tree.pin(world.tree.match(path_of(tenant, adapter), tokens), PinKind.SESSION)
        for name, prompt in kept.items():
            assert world.found(name, prompt) == sizes[name]
