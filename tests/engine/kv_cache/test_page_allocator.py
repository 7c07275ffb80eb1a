import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.kv_cache.page_allocator import PageAllocator


def test_hands_out_each_page_once_and_the_last_freed_first():
    allocator = PageAllocator(4)
    assert sorted(allocator.allocate(3) + allocator.allocate(1)) == [0, 1, 2, 3]
    allocator.free([2, 0])
    assert allocator.allocate(1) == [0]
    assert allocator.free_pages == (2,)


def test_takes_nothing_if_too_few_are_free():
    allocator = PageAllocator(2)
    with pytest.raises(ValueError, match="cannot allocate 3 pages: 2 of 2 are free"):
        allocator.allocate(3)
    assert allocator.num_free == 2


@pytest.mark.parametrize(("page", "message"), [(1, "page 1 is freed twice"), (2, "no page 2"), (-1, "no page -1")])
def test_refuses_pages_that_nobody_can_own(page, message):
    allocator = PageAllocator(2)
    with pytest.raises(ValueError, match=message):
        allocator.free([page])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "free"]), st.integers(-1, 5)), max_size=40))
def test_it_does_what_a_stack_of_free_pages_does(calls):
    allocator, free = PageAllocator(4), [3, 2, 1, 0]
    for name, number in calls:
        if name == "allocate" and 0 <= number <= len(free):
            assert allocator.allocate(number) == [free.pop() for _ in range(number)]
        elif name == "free" and 0 <= number < 4 and number not in free:
            allocator.free([number])
            free.append(number)
        else:
            with pytest.raises(ValueError, match=r"cannot allocate|there is no page|freed twice"):
                getattr(allocator, name)(number if name == "allocate" else [number])
        assert allocator.free_pages == tuple(free) and allocator.num_free == len(free)
