"""Frame order: restores the order in which a replica sent its frames, each once, regardless of the network."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

MOST_EARLY = 256
"""Largest number of frames that wait for an earlier one; if more arrive before it, the stream is broken."""


class FrameGap(Exception):
    """A frame is missing, so the replica's stream cannot continue."""


class FrameOrder(Generic[T]):
    """Puts frames in order by their numbers, which count from 0. Repeated frames are dropped, early frames wait."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, T] = {}

    def feed(self, number: int, frame: T) -> list[T]:
        """Return the frames that are due now. Raises FrameGap if too many frames wait for a missing one."""
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
