"""Caches bounded by bytes: the last used entries stay, and no more than fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rootgraft.grammar.sized_cache import ENTRY_BYTES, SizedCache, sized_cache

KEYS = st.integers(0, 6)


@given(st.integers(0, 4_000), st.lists(st.tuples(st.sampled_from(["get", "put"]), KEYS, st.integers(0, 1_500))))
def test_the_entries_used_last_stay_as_far_as_they_fit(most: int, steps: list[tuple[str, int, int]]) -> None:
    cache, order = SizedCache(most), dict[int, int]()  # sizes, the one used last at the end
    for what, key, size in steps:
        if what == "get":
            assert cache.get(key) == (key if key in order else None)
            if key in order:
                order[key] = order.pop(key)
            continue
        cache.put(key, key, size)
        order.pop(key, None)
        if size + ENTRY_BYTES <= most:
            order[key] = size + ENTRY_BYTES
        while sum(order.values()) > most:
            del order[next(iter(order))]
        assert (cache.num_bytes, len(cache)) == (sum(order.values()), len(order))


def test_a_result_is_computed_once_none_and_named_arguments_too() -> None:
    calls: list[tuple[str, bool]] = []

    @sized_cache(10_000, lambda found, text, *wide: len(text))
    def read(text: str, wide: bool = False) -> str | None:
        calls.append((text, wide))
        return None if wide else text

    for _ in range(3):
        assert read("a") == "a" and read("a", wide=True) is None and read("a", True) is None
    assert calls == [("a", False), ("a", True), ("a", True)], "a named argument is another key"
    read("b" * 20_000)
    assert read("b" * 20_000) and len(calls) == 5, "what is beyond the limit is not kept"
