"""Write queue: a block is in one place, leaves it once, and is never copied from a cell that was overwritten."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rootgraft.engine.kv_cache import write_queue
from rootgraft.engine.kv_cache.block_keys import BlockId
from rootgraft.engine.kv_cache.write_queue import Cell, WriteQueue
from rootgraft.radix.namespace import Namespace, Origin

MOST = 5
NUMBERS = st.integers(0, 7)


def block(number: int) -> BlockId:
    return BlockId(number.to_bytes(24, "big"), b"", Origin(Namespace("base"), 0, None), 0, b"")


@pytest.fixture
def queue() -> WriteQueue:
    return WriteQueue()


def test_what_is_due_comes_first_and_the_rest_in_a_pause(queue: WriteQueue) -> None:
    cells = [Cell(False, number) for number in range(4)]
    for cell in cells:
        queue.add(cell, block(cell.number), is_due=cell.number > 1)
    assert queue.take() == (cells[2], block(2)) and queue.take() == (cells[3], block(3))
    assert queue.take() is None and not queue.has_work
    queue.is_resting = True
    assert queue.has_work and queue.take() == (cells[0], block(0))
    queue.is_resting = False
    assert queue.hurry(cells[1]) and queue.take() == (cells[1], block(1)), "it was used again"


def test_a_cell_that_is_overwritten_while_it_is_copied_is_not_written(queue: WriteQueue) -> None:
    cell = Cell(True, 3)
    queue.add(cell, block(3), is_due=True)
    queue.take()
    assert queue.forget([Cell(False, 3)]) == [] and queue.forget([cell]) == [block(3)]
    assert not queue.end_read() and queue.is_writing
    queue.end_write()
    assert not queue.is_writing


class Queues(RuleBasedStateMachine):
    """Against a plain record of what each cell has."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WriteQueue()
        self.model: dict[Cell, tuple[int, bool]] = {}  # by cell: its block, and whether it is due
        self.reading: Cell | None = None
        self.next = 0

    @rule(number=NUMBERS, is_due=st.booleans())
    def offer(self, number: int, is_due: bool) -> None:
        cell = Cell(False, number)
        assert self.queue.hurry(cell) == (cell in self.model or cell == self.reading)
        if cell in self.model:
            self.model[cell] = self.model[cell][0], True
            return
        if cell == self.reading:
            return
        self.next += 1
        lost = self.queue.add(cell, block(self.next), is_due=is_due)
        self.model[cell] = self.next, is_due
        if len(self.model) > MOST:
            assert lost is not None
            [gone] = [each for each, (kept, _) in self.model.items() if block(kept) == lost]
            assert gone == cell or not self.model[gone][1], "what is due stays"
            del self.model[gone]
        else:
            assert lost is None

    @rule(number=NUMBERS)
    def forget(self, number: int) -> None:
        cell = Cell(False, number)
        known = cell in self.model or cell == self.reading
        assert len(self.queue.forget([cell])) == known
        self.model.pop(cell, None)
        self.reading = None if cell == self.reading else self.reading

    @rule(is_resting=st.booleans())
    def write(self, is_resting: bool) -> None:
        if self.queue.is_writing:
            assert self.queue.end_read() == (self.reading is not None)
            self.queue.end_write()
            self.reading = None
        self.queue.is_resting = is_resting
        taken = self.queue.take()
        assert (taken is not None) == any(is_due or is_resting for _, is_due in self.model.values())
        if taken is not None:
            self.reading, found = taken
            kept, is_due = self.model.pop(self.reading)
            assert found == block(kept)
            assert is_due or not any(each for _, each in self.model.values())

    @invariant()
    def cells_are_those_of_the_record(self) -> None:
        assert self.queue.cells == {*self.model, *((self.reading,) if self.reading else ())}
        assert len(self.model) <= MOST


def test_random_offers_writes_and_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_queue, "MOST_QUEUED", MOST)
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Queues, settings=settings(max_examples=50, stateful_step_count=40, deadline=None))
