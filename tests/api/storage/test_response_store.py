"""The store of responses: its bounds, owners and items."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.api.storage.response_store import ResponseStore, StoredResponse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(name: str, owner: str = "", size: int = 10, before: StoredResponse | None = None) -> StoredResponse:
    turn = json.dumps([{"id": f"in_{name}", "text": "x" * size}]).encode()
    output = json.dumps([{"id": f"out_{name}"}]).encode()
    turns = (*(before.conversation() if before else ()), turn)
    return StoredResponse(name, owner, b"{}", turns, output, (f"in_{name}", f"out_{name}"))


def test_owners_see_their_own() -> None:
    store = ResponseStore(1 << 20, 60)
    store.put(record("a", "me"))
    assert store.get("me", "a") is not None and store.get("you", "a") is None and store.get("me", "b") is None
    assert store.find_item("me", "out_a") == {"id": "out_a"}
    assert store.find_item("me", "in_a") and not store.find_item("you", "out_a") and not store.find_item("me", "none")
    assert not store.delete("you", "a") and store.delete("me", "a") and len(store) == 0
    assert store.find_item("me", "out_a") is None and store.num_bytes == 0


def test_the_least_recently_used_go_first() -> None:
    store = ResponseStore(1 << 20, 60, max_count=2)
    for name in "ab":
        store.put(record(name))
    store.get("", "a")
    store.put(record("c"))
    assert [name in store for name in "abc"] == [True, False, True]


def test_idle_ones_are_forgotten() -> None:
    clock = Clock()
    store = ResponseStore(1 << 20, 60, clock=clock)
    store.put(record("a"))
    store.put(record("b"))
    clock.now = 50
    assert store.get("", "a")
    clock.now = 100
    assert store.get("", "b") is None and store.get("", "a")


def test_a_chain_counts_all_of_its_turns() -> None:
    store = ResponseStore(1 << 20, 60)
    first = record("a", size=500)
    second = record("b", before=first)
    assert second.num_bytes > first.num_bytes and [item["id"] for item in second.items()] == ["in_a", "out_a", "in_b"]
    store.put(first)
    store.put(second)
    store.delete("", "a")
    assert store.num_bytes == second.num_bytes
    assert store.find_item("", "in_b") and store.find_item("", "in_a") is None


def test_an_item_is_found_as_long_as_a_response_that_has_it() -> None:
    """Clients send items of earlier answers again with their ids, or refer to them: several responses have them."""
    store = ResponseStore(1 << 20, 60)
    store.put(record("a", "me"))
    again, private = record("b", "me"), record("c", "me")
    again.turns, again.item_ids = (b'[{"id":"out_a","text":"later"}]',), ("out_a", "out_b", "out_a")
    private.turns, private.item_ids, private.connection = (b'[{"id":"out_a"}]',), ("out_a",), "f" * 32
    store.put(again)
    store.put(private)
    assert store.find_item("me", "out_a") == {"id": "out_a", "text": "later"}, "another connection's is not seen"
    assert store.find_item("me", "out_a", "f" * 32) == {"id": "out_a"}
    assert store.delete("me", "c", "f" * 32)
    assert store.delete("me", "b")
    assert store.find_item("me", "out_a") == {"id": "out_a"}
    assert store.find_item("you", "out_a") is None
    assert store.delete("me", "a")
    assert store.find_item("me", "out_a") is None


def test_nothing_is_kept_where_nothing_may_be() -> None:
    store = ResponseStore(0, 60)
    store.put(record("a"))
    assert len(store) == store.num_bytes == 0 and not store.is_on


@given(st.lists(st.tuples(st.sampled_from("pgd"), st.sampled_from("abcdef"), st.integers(0, 3000)), max_size=60))
def test_the_bounds_hold_whatever_happens(steps: list[tuple[str, str, int]]) -> None:
    clock = Clock()
    store = ResponseStore(8000, 10, max_count=4, clock=clock)
    for step, name, size in steps:
        clock.now += size / 1000
        if step == "p":
            store.put(record(name, size=size))
        elif step == "g":
            store.get("", name)
        else:
            store.delete("", name)
        alive = [store._records[key] for key in store._records]
        assert store.num_bytes == sum(one.num_bytes for one in alive) <= 8000 and len(store) <= 4
        assert set(store._responses_of_item) == {("", item) for one in alive for item in one.item_ids}


@pytest.mark.parametrize("size", [1, 100])
def test_the_gauges(size: int) -> None:
    store = ResponseStore(1 << 20, 60)
    store.put(record("a", size=size))
    assert store.stats() == {"responses_stored": 1, "responses_stored_bytes": store.num_bytes}


def test_who_stores_much_loses_its_own() -> None:
    """Whatever one owner stores, another keeps what is at most an equal part."""
    store = ResponseStore(60_000, 1e9)
    kept = [record(f"b{i}", "b") for i in range(3)]
    for each in kept:
        store.put(each)
    for i in range(200):
        store.put(record(f"a{i}", "a", size=1000 + i))
    assert all(store.get("b", each.id) for each in kept)
    assert store.num_bytes <= 60_000 and store.get("a", "a199") and store.get("a", "a0") is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4000)), max_size=60), st.booleans())
def test_an_owner_within_an_equal_part_loses_nothing(puts: list[tuple[str, int]], by_count: bool) -> None:
    limit = 20_000
    store = ResponseStore(1 << 30 if by_count else limit, 1e9, max_count=9 if by_count else 10_000)
    for number, (owner, size) in enumerate(puts):
        store.put(record(str(number), owner, size))
    for owner in "abc":
        own = [record(str(number), owner, size) for number, (each, size) in enumerate(puts) if each == owner]
        if len(own) <= 3 if by_count else sum(each.num_bytes for each in own) <= limit / 3:
            assert all(store.get(owner, each.id) for each in own)
    assert len(store) <= 9 if by_count else store.num_bytes <= limit or len(store) == 1
