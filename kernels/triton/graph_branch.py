"""A second stream within a captured pass: launches that a product need not wait for run beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_thread = threading.local()


@contextmanager
def branching(stream: torch.cuda.Stream) -> Iterator[None]:
    """Let ``start_beside`` use this stream in the pass that this thread captures inside."""
    _thread.stream = stream
    try:
        yield
    finally:
        _thread.stream = None


def start_beside(start: Callable[[], None]) -> Callable[[], None]:
    """Run launches parallel to the following ones in a captured pass; elsewhere in turn, as streams cost time.

    They begin once all that was launched before has ended. What they read and write must be allocated before this call,
    and not be freed before they are waited for.

    Returns:
        Makes later launches wait for them, on the device. A capture ends only if that was called.
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
    """Wait for what one stream does in order anyway."""
