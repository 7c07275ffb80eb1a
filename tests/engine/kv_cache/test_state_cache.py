"""Checkpoints of recurrent states in the prefix cache: where hits end, what is kept, and what is evicted."""

from __future__ import annotations

from array import array

import pytest

from rootgraft.engine.kv_cache.prefix_cache import Lease, PrefixCache
from rootgraft.engine.kv_cache.state_cache import StateSlots, share_budget
from rootgraft.radix.namespace import Namespace, Path

PAGE = 4
BASE = Path(Namespace("r"))
OTHER = Path(Namespace("r", tenant="t"))


def make(pages: int = 32, checkpoints: int = 8, interval: int = PAGE, drafts: int = 0) -> PrefixCache:
    return PrefixCache(pages, PAGE, states=StateSlots(2, checkpoints, interval, drafts))


def compute(cache: PrefixCache, tokens: array, path: Path = BASE) -> tuple[Lease, tuple[tuple[int, int], ...]]:
    """Compute all tokens in one step."""
    lease = cache.acquire(path, tokens, len(tokens) - 1)
    start = lease.num_tokens
    assert cache.grow(lease, len(tokens))
    saved = lease.take_checkpoints(start, len(tokens))
    cache.commit(lease, tokens, len(tokens))
    cache.check()
    return lease, saved


def end(cache: PrefixCache, lease: Lease, tokens: array) -> None:
    cache.release(lease, tokens, len(tokens))
    cache.check()


def test_a_hit_ends_at_the_last_checkpoint() -> None:
    cache, tokens = make(interval=2 * PAGE), array("i", range(22))
    lease, saved = compute(cache, tokens)
    assert [position for position, _ in saved] == [8, 16, 20]  # every 8, and the last page's end
    end(cache, lease, tokens)
    assert cache.match(BASE, tokens, 21) == 20
    assert cache.match(BASE, tokens, 19) == 16
    assert cache.match(BASE, tokens, 15) == 8
    assert cache.match(BASE, tokens, 7) == 0
    again = cache.acquire(BASE, tokens, 19)
    assert (again.num_tokens, again.state) == (16, dict(saved)[16])
    assert again.copy is None


def test_without_a_hit_there_is_no_state() -> None:
    assert make().acquire(BASE, array("i", range(9)), 8).state == -1


def test_the_second_sequence_leaves_a_checkpoint_where_the_common_part_ends() -> None:
    cache = make(interval=40 * PAGE)
    common = array("i", range(14))
    first = common + array("i", [50] * 9)
    end(cache, compute(cache, first)[0], first)
    second = common + array("i", [60] * 9)
    lease, saved = compute(cache, second)
    assert lease.num_tokens == 0  # KV is there up to 12, but no state
    assert [position for position, _ in saved] == [12, 20]
    end(cache, lease, second)
    third = common + array("i", [70] * 9)
    assert cache.acquire(BASE, third, 22).num_tokens == 12


def test_a_checkpoint_goes_with_its_page() -> None:
    cache, tokens = make(pages=8), array("i", range(24))
    end(cache, compute(cache, tokens)[0], tokens)
    assert cache.states is not None
    assert cache.states.num_kept == 6
    others = array("i", range(100, 124))
    lease = cache.acquire(OTHER, others, 23)
    assert cache.grow(lease, 24)  # evicts four pages
    assert cache.states.num_kept == 2
    cache.check()
    assert cache.drop(BASE.namespace) == 2
    assert cache.states.num_kept == 0
    cache.check()


def test_a_checkpoint_that_is_still_to_be_read_is_not_evicted() -> None:
    cache, tokens = make(checkpoints=2, interval=100 * PAGE), array("i", range(9))
    end(cache, compute(cache, tokens)[0], tokens)
    reader = cache.acquire(BASE, tokens, 8)
    for number in range(5):  # each wants a checkpoint
        others = array("i", range(50 * number + 100, 50 * number + 109))
        end(cache, compute(cache, others)[0], others)
    assert cache.states is not None
    assert cache.states.num_evicted == 4
    assert cache.match(BASE, tokens, 8) == 8
    assert cache.grow(reader, 9)
    cache.commit(reader, tokens, 9)  # has read it
    for number in range(2):
        others = array("i", range(50 * number + 500, 50 * number + 509))
        end(cache, compute(cache, others)[0], others)
    assert cache.match(BASE, tokens, 8) == 0


def test_without_a_free_slot_nothing_is_saved_and_nothing_fails() -> None:
    cache, tokens = make(checkpoints=1), array("i", range(18))
    lease, saved = compute(cache, tokens)
    assert len(saved) == 1  # the slot is reserved until the step is committed
    end(cache, lease, tokens)
    assert cache.match(BASE, tokens, 17) == PAGE


def test_reserved_slots_come_back_from_a_sequence_that_ends_in_flight() -> None:
    cache, tokens = make(), array("i", range(18))
    lease = cache.acquire(BASE, tokens, 17)
    assert cache.grow(lease, 18)
    assert len(lease.take_checkpoints(0, 18)) == 4
    cache.release(lease, tokens, 0)
    assert cache.states is not None
    assert (cache.states.num_free, cache.states.num_kept) == (8, 0)
    cache.check()


def test_the_tenant_with_the_most_checkpoints_loses_them_first() -> None:
    cache, mine, theirs = make(checkpoints=5), array("i", range(9)), array("i", range(50, 63))
    end(cache, compute(cache, mine)[0], mine)
    end(cache, compute(cache, theirs, OTHER)[0], theirs)
    more = array("i", range(80, 89))
    end(cache, compute(cache, more, OTHER)[0], more)
    assert cache.match(BASE, mine, 8) == 8
    assert cache.states is not None
    assert cache.states.num_kept == 5


def test_of_one_tenant_the_checkpoints_used_least_recently_go_first() -> None:
    cache = make(checkpoints=2, interval=2 * PAGE)
    first, second, third = (array("i", range(start, start + 9)) for start in (0, 20, 40))
    for tokens in (first, second, first, third):
        end(cache, compute(cache, tokens)[0], tokens)
    assert [cache.match(BASE, tokens, 8) for tokens in (first, second, third)] == [8, 0, 8]


def test_both_of_two_that_compute_the_same_keep_one_checkpoint() -> None:
    cache, tokens = make(), array("i", range(9))
    leases = [cache.acquire(BASE, tokens, 8) for _ in range(2)]
    for lease in leases:
        assert cache.grow(lease, 9)
        assert len(lease.take_checkpoints(0, 9)) == 2
    for lease in leases:
        cache.commit(lease, tokens, 9)
        cache.check()
    assert cache.states is not None
    assert (cache.states.num_kept, cache.states.num_free) == (2, 6)


def test_without_sharing_there_are_no_checkpoints() -> None:
    cache = PrefixCache(8, PAGE, sharing=False, states=StateSlots(2, 0, PAGE))
    lease, saved = compute(cache, array("i", range(9)))
    assert (saved, lease.state) == ((), -1)


@pytest.mark.parametrize("state_bytes", [1, 10, 32, 33, 50, 64, 65, 200, 10**6])
def test_the_budget_holds(state_bytes: int) -> None:
    budget, page_bytes = 800, 32
    pages, slots = share_budget(budget, PAGE, page_bytes, state_bytes, 2, sharing=True)
    run = slots.interval // PAGE
    assert run * page_bytes >= state_bytes > (run - 1) * page_bytes
    assert slots.num_checkpoints * state_bytes <= pages * page_bytes
    left = budget - pages * page_bytes - slots.total * state_bytes
    assert 0 <= left < run * page_bytes + state_bytes or pages == slots.num_checkpoints == 0 > left
    alone, without = share_budget(budget, PAGE, page_bytes, state_bytes, 2, sharing=False)
    assert alone >= pages
    assert without.num_checkpoints == 0


def test_after_a_rejected_draft_the_next_step_reads_the_state_before_it() -> None:
    cache, tokens = make(interval=40 * PAGE, drafts=4), array("i", range(13))
    lease, _ = compute(cache, tokens[:9])
    assert cache.states is not None
    assert lease.most_drafts(9) == 4
    assert cache.grow(lease, 12)
    saved = dict(lease.take_drafted(9, 3))
    assert list(saved) == [9, 10, 11] and lease.most_drafts(12) == 1
    cache.check()
    cache.commit(lease, tokens, 10)  # the first is accepted
    assert lease.uses.resumed == saved[10] and cache.states.num_free_drafts == 3
    assert lease.take_resumed() == saved[10] and lease.take_resumed() == -1
    lease.put_back(saved[10])  # the step did without it
    assert lease.take_resumed() == saved[10]
    cache.check()
    assert cache.states.num_free_drafts == 3  # the step still reads it
    cache.commit(lease, tokens, 11)
    assert (lease.uses.resumed, cache.states.num_free_drafts) == (-1, 4)
    end(cache, lease, tokens[:11])


def test_accepted_drafts_and_ended_sequences_give_their_slots_back() -> None:
    cache, tokens = make(interval=40 * PAGE, drafts=4), array("i", range(14))
    lease, _ = compute(cache, tokens[:9])
    assert cache.grow(lease, 14)
    lease.take_drafted(9, 2)
    cache.commit(lease, tokens, 11)  # both are
    assert lease.uses.resumed == -1 and lease.most_drafts(11) == 4
    lease.take_drafted(11, 2)
    cache.check()
    end(cache, lease, tokens[:11])  # before the step is read
    assert cache.states is not None and cache.states.num_free_drafts == 4


def test_no_drafts_behind_a_checkpoint_nor_where_there_are_no_slots() -> None:
    cache, tokens = make(drafts=4), array("i", range(8))
    lease = cache.acquire(BASE, tokens, 7)
    assert cache.grow(lease, 8)
    lease.take_checkpoints(0, 8)
    assert lease.most_drafts(8) == 0
    assert lease.most_drafts(7) == 4
    assert make().acquire(BASE, tokens, 7).most_drafts(7) == 0
    assert PrefixCache(9, PAGE).acquire(BASE, tokens, 7).most_drafts(7) is None


def test_states_before_drafts_take_an_eighth_at_most() -> None:
    for most, expected in ((0, 0), (5, 5), (12, 12), (64, 12)):
        num_pages, slots = share_budget(102 * 1000, PAGE, 100, 1000, 1, sharing=True, most_drafts=most)
        assert slots.num_drafts == expected
        assert num_pages * 100 + slots.total * 1000 <= 102 * 1000
    assert share_budget(2500, PAGE, 100, 1000, 1, sharing=False, most_drafts=9)[1].num_drafts == 0
