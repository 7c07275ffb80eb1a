"""A second stream of a GPU, parallel to the one that computes steps. Copies and sums on it delay no step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


class SideStream:
    """Work parallel to the steps of a device. On a CPU all work is done at once, and there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def work(self) -> Iterator[None]:
        """Run the work that this thread starts in the block on the side stream, including memory that it allocates."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> SideMark:
        """Return a mark after all work started so far."""
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(self._stream)
        return SideMark(event)


@cache
def side_stream(device: torch.device) -> SideStream:
    """Return the stream of a device for all work beside its steps."""
    return SideStream(device)


class SideMark:
    """A place in the work of a ``SideStream``."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    @property
    def is_reached(self) -> bool:
        """Return whether all work before the mark is done, without waiting."""
        return self._event is None or self._event.query()

    def hand_over(self, *tensors: Tensor) -> None:
        """Let the current stream use tensors of the side stream, after the mark, until they are freed."""
        if self._event is None:
            return
        current = torch.cuda.current_stream(tensors[0].device) if tensors else torch.cuda.current_stream()
        current.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(current)
