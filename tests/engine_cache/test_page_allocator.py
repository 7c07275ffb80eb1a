import pytest

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
