"""A second stream within a captured pass, which runs launches parallel to others that do not depend on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_thread = threading.local()


@contextmanager
def branching(stream: torch.cuda.Stream) -> Iterator[None]:
    """Let ``start_beside`` use this stream in the pass that this thread captures inside the block."""
    _thread.stream = stream
    try:
        yield
    finally:
        _thread.stream = None


def start_beside(start: Callable[[], None]) -> Callable[[], None]:
    """In a captured pass, run the launches of ``start`` in parallel with the launches that follow this call.

    Outside of a capture they run in order, because a second stream would take more time than it saves. The launches
    begin once all earlier launches have ended. Their inputs and outputs must be allocated before this call, and must
    not be freed before the wait.

    Returns:
        A function that makes later launches wait, on the device, for the launches of ``start``. It must be called
        before the capture ends.
    """
    side = getattr(_thread, "stream", None)
    if side is None:
        start()
        return _nothing
    main = torch.cuda.current_stream(side.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        start()

    def wait() -> None:
        main.wait_stream(side)

    return wait


def _nothing() -> None:
    """Do nothing: launches of one stream run in order anyway."""
