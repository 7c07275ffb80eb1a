"""Frame order: frames of one replica in the order in which it sent them, each once, whatever the network does."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

MOST_EARLY = 256
"""Frames that may wait for one before them; a gap that lasts longer is a broken stream."""


class FrameGap(Exception):
    """A frame is missing: the replica's stream cannot go on."""


class FrameOrder(Generic[T]):
    """Numbers count from 0. Frames that were seen before are dropped, early ones wait for those before them."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, T] = {}

    def feed(self, number: int, frame: T) -> list[T]:
        """Return the frames that are due now. Raises FrameGap if too many wait for one."""
        if number < self._next:
            return []
        self._early[number] = frame
        due = []
        while self._next in self._early:
            due.append(self._early.pop(self._next))
            self._next += 1
        if len(self._early) > MOST_EARLY:
            raise FrameGap(f"frame {self._next} is missing, and {len(self._early)} after it are there")
        return due
