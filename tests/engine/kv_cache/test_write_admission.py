"""Write admission: all is written until a tier was filled in vain, and what comes again is never left out for long."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rootgraft.engine.kv_cache.write_admission import WriteAdmission


def offer(admission: WriteAdmission, numbers: range) -> int:
    """Return how many of these pages are written."""
    return sum(admission.admits(number.to_bytes(8, "big")) for number in numbers)


def test_all_is_written_until_the_tier_is_full_once() -> None:
    admission = WriteAdmission(100)
    assert offer(admission, range(99)) == 99
    assert offer(admission, range(99, 400)) == 0 and admission.is_selective


def test_what_is_seen_twice_is_written_then() -> None:
    admission = WriteAdmission(1000)
    offer(admission, range(1000))
    assert offer(admission, range(1000, 1020)) == 0
    assert offer(admission, range(1000, 1020)) == 20
    assert offer(admission, range(1000, 1020)) == 0, "they were lost again meanwhile: once more"


def test_a_load_that_comes_again_ends_the_selection() -> None:
    admission = WriteAdmission(400)
    offer(admission, range(400))
    assert admission.is_selective
    offer(admission, range(1000, 1010))
    assert offer(admission, range(1000, 1010)) == 10 and not admission.is_selective
    assert offer(admission, range(2000, 2100)) == 100


def test_reads_that_pay_keep_all_writes() -> None:
    admission = WriteAdmission(400)
    for start in range(0, 4000, 20):
        admission.want(1)
        assert offer(admission, range(start, start + 20)) == 20


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 500), st.integers(0, 1 << 30))
def test_documents_asked_in_turn_are_computed_at_most_once_more(num_pages: int, num_documents: int, seed: int) -> None:
    """Whatever was asked before: from the second time on, each document of a round is written."""
    admission = WriteAdmission(num_pages)
    offer(admission, range(1 << 20, (1 << 20) + random.Random(seed).randrange(2 * num_pages)))
    written: set[int] = set()
    for _ in range(2):
        for number in range(num_documents):
            if number not in written and admission.admits(number.to_bytes(8, "big")):
                written.add(number)
    assert written == {*range(num_documents)}
