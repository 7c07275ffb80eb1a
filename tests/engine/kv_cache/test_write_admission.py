"""Write admission: a fixed number of pages is written without evidence, and then as many as what came again has paid.

``SimulatedTier`` is a pool and a tier of pages without content, in which streams of documents are asked for.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootgraft.engine.kv_cache import write_admission
from rootgraft.engine.kv_cache.block_keys import BlockId
from rootgraft.engine.kv_cache.tier_index import TierIndex
from rootgraft.engine.kv_cache.write_admission import MOST_GHOSTS, WRITES_OF_A_HIT, WRITTEN_POOLS, WriteAdmission
from rootgraft.radix.namespace import Namespace, Origin

EVERYTHING = 1 << 40
Page = tuple[int, int]  # document, and index of the page in it


def block(number: int, tenant: str = "") -> BlockId:
    key = random.Random(f"{number} {tenant}").randbytes(24)
    return BlockId(key, b"", Origin(Namespace("base", tenant=tenant), 0, None), 0, b"")


def offer(admission: WriteAdmission, numbers: Iterable[int], tenant: str = "") -> int:
    """Return how many of these pages are written; the others leave the pool."""
    written = 0
    for number in numbers:
        if admission.admits(block(number, tenant)):
            written += 1
        else:
            admission.lose(block(number, tenant))
    admission.check()
    return written


class SimulatedTier:
    """A pool and a tier, in both of which the pages that were used last stay. The engine never has a pause.

    Attributes:
        computed: pages that were computed.
        written: pages that were written.
    """

    def __init__(self, pool_pages: int, tier_pages: int, *, writes_all: bool = False) -> None:
        self.admission = WriteAdmission(EVERYTHING if writes_all else tier_pages, None if writes_all else pool_pages)
        self.pool_pages = pool_pages
        self.pool = OrderedDict[Page, bool]()  # whether the page is written
        self.tier = TierIndex(tier_pages, lambda: 0.0)
        self.computed, self.written = list[Page](), 0

    def ask(self, document: int, length: int) -> None:
        for page in ((document, index) for index in range(length)):
            name = block(hash(page))
            if page in self.pool:
                if not self.pool[page]:  # used again while it waited
                    self.write(page)
                self.pool.move_to_end(page)
                continue
            if self.tier.touch(name.key):
                self.admission.want("", 1)
                self.pool[page] = True
            else:
                self.computed.append(page)
                self.pool[page] = False
                if self.admission.admits(name):
                    self.write(page)
            while len(self.pool) > self.pool_pages:
                lost, is_written = self.pool.popitem(last=False)
                if not is_written:
                    self.admission.lose(block(hash(lost)))
        self.admission.check()

    def write(self, page: Page) -> None:
        self.tier.make_room(1)
        self.tier.add(block(hash(page)).key, "", 1)
        self.pool[page] = True
        self.written += 1


def both(asked: Sequence[tuple[int, int]], pool: int, tier: int) -> tuple[SimulatedTier, SimulatedTier]:
    """Ask a tier with admission, and one that is always written to, for documents of some lengths."""
    made = SimulatedTier(pool, tier), SimulatedTier(pool, tier, writes_all=True)
    for each in made:
        for document, length in asked:
            each.ask(document, length)
    return made


def in_turn(first: int, count: int, rounds: int, length: int = 4) -> list[tuple[int, int]]:
    return [(first + number, length) for _ in range(rounds) for number in range(count)]


def test_some_pools_are_written_and_then_nothing_that_does_not_come_again() -> None:
    admission = WriteAdmission(1000, 20)
    assert offer(admission, range(5000)) == 20 * WRITTEN_POOLS
    assert admission.num_unwritten == 5000 - 20 * WRITTEN_POOLS and admission.num_ghost_hits == 0


def test_a_small_tier_is_filled_once() -> None:
    assert offer(WriteAdmission(30, 20), range(5000)) == offer(WriteAdmission(30), range(5000)) == 30


def test_a_ghost_hit_is_written_and_pays_for_others_at_once() -> None:
    admission = WriteAdmission(1000, 20)
    offer(admission, range(500))
    assert offer(admission, [400]) == 1 and admission.num_ghost_hits == 1
    assert offer(admission, range(1000, 2000)) == WRITES_OF_A_HIT - 1
    assert offer(admission, [400]) == 0, "it left the list when it was written"


def test_a_read_pays_for_writes_up_to_a_bound() -> None:
    admission = WriteAdmission(1000, 20)
    offer(admission, range(500))
    admission.want("", 2)
    assert offer(admission, range(1000, 2000)) == 2 * WRITES_OF_A_HIT
    admission.want("", 10**6)
    assert offer(admission, range(2000, 5000)) == 20 * WRITTEN_POOLS


def test_what_one_tenant_earns_no_other_spends() -> None:
    admission = WriteAdmission(1000, 20)
    offer(admission, range(500), "vain")
    admission.want("useful", 1)
    assert offer(admission, range(500, 1000), "vain") == 0
    assert offer(admission, range(500), "useful") == WRITES_OF_A_HIT


def test_no_tenant_pushes_the_ghosts_of_another_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_admission, "MOST_GHOSTS", 64)
    admission = WriteAdmission(64, 1)
    offer(admission, range(5), "vain")
    offer(admission, range(20), "useful")
    offer(admission, range(5, 5000), "vain")
    assert offer(admission, range(20), "useful") == 20 and admission.num_ghost_hits == 20


def test_of_a_tier_larger_than_the_list_a_sample_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document is noticed by some of its pages, and these pay for the others."""
    monkeypatch.setattr(write_admission, "MOST_GHOSTS", 64)
    admission = WriteAdmission(64 * 8, 1)
    offer(admission, range(WRITTEN_POOLS))
    offer(admission, range(1000, 1400))
    written = offer(admission, range(1000, 1400))
    assert 20 < admission.num_ghost_hits < 100 and written > 200


def test_cleared_caches_are_not_remembered() -> None:
    admission = WriteAdmission(100, 1)
    offer(admission, range(50))
    admission.clear()
    assert offer(admission, range(50)) == 0


def test_a_working_set_of_four_pools_hits_as_if_all_were_written() -> None:
    some, every = both(in_turn(0, 16, 6), pool=16, tier=200)
    assert some.computed == every.computed and some.written == every.written == 64


def test_prompts_that_never_come_again_cost_a_bounded_number_of_writes() -> None:
    some, every = both(in_turn(0, 2000, 1), pool=16, tier=10_000)
    assert some.written == WRITTEN_POOLS * 16 and every.written == 8000


def test_zipf_after_prompts_in_vain_loses_little() -> None:
    rng = random.Random(5)
    ranks = rng.choices(range(200), [1 / (rank + 1) for rank in range(200)], k=3000)
    asked = [*in_turn(1000, 200, 1), *((rank, 4) for rank in ranks)]
    some, every = both(asked, pool=64, tier=2000)
    wanted = 4 * len(asked)
    assert (len(some.computed) - len(every.computed)) / wanted < 0.03
    assert some.written <= every.written


phases = st.lists(
    st.one_of(
        st.builds(in_turn, st.integers(1000, 10**6), st.integers(1, 60), st.just(1), st.integers(1, 6)),
        st.builds(in_turn, st.just(0), st.integers(1, 40), st.integers(1, 4)),
        st.builds(
            lambda count, seed: [
                (rank, 4)
                for rank in random.Random(seed).choices(range(count), [1 / (k + 1) for k in range(count)], k=60)
            ],
            st.integers(1, 40),
            st.integers(0, 1 << 20),
        ),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(phases, st.integers(4, 60))
def test_each_page_is_computed_at_most_once_more_and_writes_are_paid(
    loads: list[list[tuple[int, int]]], pool: int
) -> None:
    """Whatever phases follow each other, where the tier has room and each key is remembered: against a tier that is
    always written to."""
    some, every = both([each for load in loads for each in load], pool, tier=MOST_GHOSTS)
    assert len(every.computed) == len({*every.computed})
    counts = {page: some.computed.count(page) for page in {*some.computed}}
    assert counts.keys() == {*every.computed} and max(counts.values()) <= 2
    reads = sum(length for load in loads for _, length in load) - len(some.computed)
    again = len(some.computed) - len(counts)
    assert some.written <= WRITTEN_POOLS * pool + WRITES_OF_A_HIT * again + WRITES_OF_A_HIT * reads
    assert again <= some.admission.num_unwritten
