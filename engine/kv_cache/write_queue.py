"""Write queue: the blocks of the pool that are not in all tiers yet, those that are due and those for a pause."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .block_keys import BlockId

MOST_QUEUED = 1 << 16
"""Blocks in a queue, so that its memory is bounded however many pages the pool has."""


class Cell(NamedTuple):
    """Place of a block in the pool: a page of KV, or a slot of recurrent states."""

    is_state: bool
    number: int


@dataclass(slots=True)
class WriteQueue:
    """Blocks by their cells, in the order in which they are written. Its callers share a lock.

    A block is in one place at a time, and its cell does not change until ``forget``.

    Attributes:
        due: blocks that the writer takes as soon as it can.
        later: blocks that it takes while the engine has a pause; the first ones leave the queue when it is full.
        reading: the block that the writer copies from the pool; None if absent, or if its cell was forgotten meanwhile.
        is_writing: whether the writer has a block.
        is_resting: whether the engine has a pause: no sequence is running or waiting. Set by the engine's thread, and
            seen by the writer before its next block.
        is_sweeping: whether the stores have files of forgotten pages to remove.
    """

    due: OrderedDict[Cell, BlockId] = field(default_factory=OrderedDict)
    later: OrderedDict[Cell, BlockId] = field(default_factory=OrderedDict)
    reading: tuple[Cell, BlockId] | None = None
    is_writing: bool = False
    is_resting: bool = False
    is_sweeping: bool = False

    @property
    def has_work(self) -> bool:
        """Whether there is something to do for the writer now."""
        return bool(self.due or self.is_sweeping or (self.is_resting and self.later))

    @property
    def cells(self) -> set[Cell]:
        """The cells of all blocks that are not copied yet."""
        return {*self.due, *self.later, *((self.reading[0],) if self.reading else ())}

    def hurry(self, cell: Cell) -> bool:
        """Make the block of a cell due, if it is here. Returns whether it is."""
        if (block := self.later.pop(cell, None)) is not None:
            self.due[cell] = block
        return cell in self.due or (self.reading is not None and self.reading[0] == cell)

    def add(self, cell: Cell, block: BlockId, *, is_due: bool) -> BlockId | None:
        """Add a block whose cell is not here. Returns the block that there is no room for; None if there is room."""
        lost = None
        if len(self.due) + len(self.later) >= MOST_QUEUED:
            if not self.later:
                return block
            _, lost = self.later.popitem(last=False)
        (self.due if is_due else self.later)[cell] = block
        return lost

    def take(self) -> tuple[Cell, BlockId] | None:
        """Return what to copy next, and note that the writer has it; None for nothing."""
        blocks = self.due or (self.later if self.is_resting else self.due)
        if not blocks:
            return None
        self.reading = blocks.popitem(last=False)
        self.is_writing = True
        return self.reading

    def end_read(self) -> bool:
        """Note that the writer has copied its block. Returns whether the copy is right: the cell was not forgotten."""
        is_current, self.reading = self.reading is not None, None
        return is_current

    def end_write(self) -> None:
        """Note that the writer is done with its block, written or not."""
        self.reading, self.is_writing = None, False

    def forget(self, cells: Iterable[Cell]) -> list[BlockId]:
        """Remove the blocks of cells that are overwritten soon. Returns those that were here, which are not written."""
        lost = []
        for cell in cells:
            block = self.due.pop(cell, None) or self.later.pop(cell, None)
            if block is None and self.reading is not None and self.reading[0] == cell:
                (_, block), self.reading = self.reading, None
            if block is not None:
                lost.append(block)
        return lost

    def clear(self) -> None:
        """Remove all blocks."""
        self.due.clear()
        self.later.clear()
        self.reading = None
