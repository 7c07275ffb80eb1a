from array import array

from hypothesis import given
from hypothesis import strategies as st

from rootgraft.radix.namespace import Namespace, Origin
from rootgraft.radix.node import Node, Siblings, common_pages, common_tokens

INTS = st.lists(st.sampled_from([0, 1, 256, -1, 2**31 - 1]), max_size=9)


def memory(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def agreeing(left: list[int], right: list[int]) -> int:
    """Token by token."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@given(INTS, INTS)
def test_common_tokens_counts_token_by_token(left, right):
    assert common_tokens(memory(left), memory(right)) == agreeing(left, right)


@given(INTS, INTS, st.integers(0, 3), st.integers(1, 3))
def test_common_pages_counts_whole_pages(left, tail, before, page_size):
    run = left + tail
    tokens = [5] * before + left + [7, 7, 7]
    most = len(run) // page_size
    expected = min(agreeing([*left, 7, 7, 7], run) // page_size, most)
    assert common_pages(memory(tokens), 4 * before, bytearray(memory(run)), most, 4 * page_size) == expected


@given(st.lists(INTS, max_size=12), INTS)
def test_siblings_find_what_a_search_of_all_finds(keys, wanted):
    siblings, kept = Siblings(), []
    for key in keys:
        if not any(agreeing(key, other) == min(len(key), len(other)) for other in kept):
            siblings.add(memory(key), Node(Origin(Namespace("r")), memory(key), [len(kept)]))
            kept.append(key)
    found, shared = siblings.longest(memory(wanted))
    assert shared == max((agreeing(key, wanted) for key in kept), default=0)
    assert found is None or agreeing(kept[found.pages[0]], wanted) == shared
    exact = siblings.find(memory(wanted))
    assert (exact is not None) == (wanted in kept)
    longer = siblings.extension_of(memory(wanted))
    assert (longer is not None) == any(key[: len(wanted)] == wanted for key in kept)
    shorter = siblings.prefix_of(memory(wanted))
    assert (shorter is not None) == any(wanted[: len(key)] == key and key != wanted for key in kept)
    assert siblings.keys == sorted(siblings.keys)
