"""Routing: cached prefixes attract, waits repel, homes agree between gateways, adapters spread with their load."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.messages import Ready
from rootgraft.fleet.placement.prefix_chain import BLOCK, KvScope, prefix_chain
from rootgraft.fleet.placement.prefix_index import PrefixIndex
from rootgraft.fleet.placement.replica_table import FIRST_RATE, ReplicaTable

SCOPE = KvScope("base")


def ready(base: str = "base", pages: int = 1000) -> Ready:
    return Ready(8192, 50_000, pages, 16, (), base_digest=base)


def table_of(count: int, **options: Any) -> ReplicaTable:
    table = ReplicaTable(16, **({"adapter_slots": 2, "adapter_load_seconds": 0.5} | options))
    for number in range(count):
        table.join(f"r{number}", ready(), 0.0)
    return table


def tokens_of(seed: int, blocks: int) -> array[int]:
    return array("i", [seed * 1000 + number for number in range(blocks * BLOCK)])


def send(table: ReplicaTable, tokens: array[int], number: int, adapter: str | None = None) -> str:
    """Route and place a sequence; its first token comes at once."""
    chain = prefix_chain(KvScope("base", adapter), tokens)
    info, route = table.choose(chain, len(tokens), adapter=adapter)
    assert info is not None
    table.place(info, number, chain, len(tokens) - route.num_cached, adapter)
    table.begun(info, number)
    return info.name


@pytest.mark.parametrize("field", ["base", "adapter", "salt", "tenant"])
def test_every_isolation_key_is_part_of_the_chain(field: str) -> None:
    tokens = tokens_of(1, 2)
    one, other = prefix_chain(SCOPE, tokens), prefix_chain(SCOPE._replace(**{field: "x"}), tokens)
    assert len(one) == 3 and not set(one) & set(other)


@given(st.lists(st.integers(0, 3), max_size=4 * BLOCK), st.lists(st.integers(0, 3), max_size=4 * BLOCK))
def test_chains_agree_exactly_as_far_as_whole_blocks_do(one: list[int], other: list[int]) -> None:
    same = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    common = min(len(one), len(other)) if same is None else same
    chains = [prefix_chain(SCOPE, array("i", tokens)) for tokens in (one, other)]
    agree = sum(left == right for left, right in zip(*chains, strict=False))
    assert agree == 1 + common // BLOCK


def test_chains_are_the_same_in_every_process() -> None:
    assert prefix_chain(SCOPE, tokens_of(0, 1)) == (2862640858053342715, 17357502827185552012)


class Naive:
    """An index of sets, without a limit."""

    def __init__(self) -> None:
        self.held: dict[int, set[int]] = {}

    def cached(self, chain: Sequence[int], replica: int) -> int:
        held = self.held.get(replica, set())
        return max((depth * BLOCK for depth in range(1, len(chain)) if chain[depth] in held), default=0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 4), st.booleans()), max_size=40))
def test_the_index_says_what_sets_say(operations: list[tuple[int, int, int, bool]]) -> None:
    index, naive = PrefixIndex(5), Naive()
    for replica in range(5):
        index.open(replica, 10_000 * BLOCK)
    for replica, seed, blocks, closes in operations:
        if closes:
            index.close(replica)
            index.open(replica, 10_000 * BLOCK)
            naive.held[replica] = set()
        chain = prefix_chain(SCOPE, tokens_of(seed, blocks))
        index.add(replica, chain)
        naive.held.setdefault(replica, set()).update(chain[1:])
        asked = prefix_chain(SCOPE, tokens_of(seed, 4))
        found, deepest = index.cached(asked)
        assert list(found) == [naive.cached(asked, each) for each in range(5)]
        assert deepest * BLOCK == max(found)


def test_the_index_keeps_as_much_as_the_pool_of_a_replica_holds() -> None:
    index = PrefixIndex(2)
    index.open(0, 10 * BLOCK)
    for seed in range(9):
        index.add(0, prefix_chain(SCOPE, tokens_of(seed, 3)))
    assert len(index) == 10
    assert index.cached(prefix_chain(SCOPE, tokens_of(8, 3)))[0][0] == 3 * BLOCK
    # Of the oldest that is left, the first block is.
    assert index.cached(prefix_chain(SCOPE, tokens_of(5, 3)))[0][0] == BLOCK
    index.close(0)
    assert not len(index)


def test_a_cached_prefix_attracts_and_a_wait_repels() -> None:
    table = table_of(4)
    prompt = tokens_of(1, 20)
    home = send(table, prompt, 0)
    assert {send(table, prompt, number) for number in range(1, 4)} == {home}
    chain = prefix_chain(SCOPE, prompt)
    table.place(table.replicas[home], 99, chain, 100_000, None)  # a long prompt that it has to compute first
    other = send(table, prompt, 5)
    assert other != home
    table.ended(table.replicas[home], 99)
    assert {send(table, prompt, number) for number in range(6, 16)} == {home, other}


@pytest.mark.parametrize(("least", "goes_home"), [(0, False), (4000, True)])
def test_a_cached_prefix_attracts_more_where_all_are_busy(least: int, goes_home: bool) -> None:
    """It is worth three prompts of 1,280 tokens of wait, but not while the other one is idle."""
    table = table_of(2)
    prompt = tokens_of(1, 20)
    home = send(table, prompt, 0)
    table.ended(table.replicas[home], 0)
    [other] = set(table.replicas) - {home}
    for name, tokens in ((home, least + 3 * len(prompt)), (other, least)):
        table.place(table.replicas[name], 1, (0,), tokens, None)
    assert (send(table, prompt, 2) == home) is goes_home


def test_new_prefixes_go_to_the_same_home_on_every_gateway() -> None:
    """Whatever order replicas joined in, and whichever slot they have."""
    one, other = table_of(0), table_of(0)
    for number in range(6):
        one.join(f"r{number}", ready(), 0.0)
        other.join(f"r{5 - number}", ready(), 0.0)
    homes = []
    for seed in range(200):
        chain = prefix_chain(SCOPE, tokens_of(seed, 3))
        left, right = (table.choose(chain, 3 * BLOCK)[0] for table in (one, other))
        assert left is not None and right is not None and left.name == right.name
        homes.append(left.name)
    assert all(homes.count(name) > 10 for name in one.replicas)


def test_branches_of_a_known_prefix_spread() -> None:
    table = table_of(4)
    stem = tokens_of(0, 1)
    send(table, stem, 0)
    used = {send(table, stem + tokens_of(seed, 8), seed) for seed in range(1, 30)}
    assert used == set(table.replicas)


@given(st.integers(0, 1000), st.integers(1, 8))
def test_one_replica_less_moves_only_its_own_homes(seed: int, gone: int) -> None:
    table = table_of(9)
    chain = prefix_chain(SCOPE, tokens_of(seed, 2))
    before, _ = table.choose(chain, 2 * BLOCK)
    table.leave(f"r{gone}")
    after, _ = table.choose(chain, 2 * BLOCK)
    assert before is not None and after is not None
    assert after.name == before.name or before.name == f"r{gone}"


def test_slow_replicas_get_less() -> None:
    table = table_of(2)
    slow = table.replicas["r0"]
    table.beat(slow, {"computed_tokens": 1e6, "seconds_step": 1e6 / (FIRST_RATE / 10)})
    names = [send(table, tokens_of(seed, 1), seed) for seed in range(44)]
    assert 1 <= names.count("r0") < 12


def test_rows_of_other_gateways_count() -> None:
    table = table_of(2)
    table.beat(table.replicas["r0"], {"running": 30.0, "waiting": 10.0})
    assert {send(table, tokens_of(seed, 1), seed) for seed in range(20)} == {"r1"}


def test_draining_foreign_and_excluded_replicas_are_left_out() -> None:
    table = table_of(3)
    table.join("new", ready("other"), 0.0)
    chain = prefix_chain(SCOPE, tokens_of(1, 1))
    table.drain("r0")

    def choose(**options: Any) -> str | None:
        info, _ = table.choose(chain, BLOCK, **options)
        return info and info.name

    assert choose(base_digest="other") == "new"
    assert choose(base_digest="base", excluded={"r1"}) == "r2"
    assert choose(base_digest="base", excluded={"r1", "r2"}) is None
    assert choose(base_digest="nobody's") is None


def test_silent_replicas_are_the_last_resort() -> None:
    table = table_of(2)
    chain = prefix_chain(SCOPE, tokens_of(1, 1))
    table.hear(table.replicas["r1"], 10.0)
    info, _ = table.choose(chain, BLOCK, heard_since=5.0)
    assert info is table.replicas["r1"]
    info, _ = table.choose(chain, BLOCK, heard_since=5.0, excluded={"r1"})
    assert info is table.replicas["r0"]


def test_an_adapter_stays_where_it_is_loaded() -> None:
    table = table_of(4)
    homes = {name: send(table, tokens_of(0, 1), number, name) for number, name in enumerate(("a", "b", "c"))}
    for number in range(100, 104):
        for name in homes:
            assert send(table, tokens_of(number, 1), number, name) == homes[name]
            table.ended(table.replicas[homes[name]], number)


def test_an_adapter_with_most_of_the_load_has_more_replicas() -> None:
    table = table_of(4, adapter_slots=4)
    used: Counter[str] = Counter()
    running: deque[tuple[str, int]] = deque()
    for number in range(900):
        name = "hot" if number % 5 else f"cold-{number % 3}"
        running.append((send(table, tokens_of(number, 1), number, name), number))
        used[running[-1][0]] += name == "hot"
        if len(running) > 16:
            replica, first = running.popleft()
            table.ended(table.replicas[replica], first)
    assert min(used[name] for name in table.replicas) > 100


def test_a_new_adapter_is_loaded_where_the_fewest_sequences_went() -> None:
    table = table_of(4, adapter_slots=2)
    number, places = 0, {}
    for rank in range(1, 9):  # one has half of the load, the next one half of that, and so on
        for _ in range(256 >> rank):
            number += 1
            places[rank] = send(table, tokens_of(number, 1), number, f"a{rank}")
            table.ended(table.replicas[places[rank]], number)
    assert len({places[rank] for rank in range(1, 5)}) == 4, "one a replica"
    assert [places[rank] for rank in range(5, 9)] == [places[4], places[3], places[2], places[1]]


def test_tables_refuse_what_does_not_fit() -> None:
    table = ReplicaTable(1, 1, 0.5)
    table.join("a", ready(), 0.0)
    with pytest.raises(ValueError, match="there already"):
        table.join("a", ready(), 0.0)
    with pytest.raises(IndexError):
        table.join("b", ready(), 0.0)
    table.leave("a")
    table.join("b", ready(), 0.0)
