"""Sequence windows: runs the sequences of one request, a limited number at a time, with one deadline for all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from ...engine.errors import DeadlineExceeded, EngineError
from ...engine.serving.output_processor import SequenceOutput
from ...engine.serving.request import TextRequest
from ...engine.types import FinishReason, Usage
from ..access.caller import Caller

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine

WINDOW = 256
"""Largest number of sequences of one request that the engine has at a time."""


def deadline_of(caller: Caller) -> float | None:
    """Return the monotonic time in seconds by which a request must have ended; None for no limit."""
    left = caller.seconds_left
    return None if left is None else time.monotonic() + left


async def run_window(
    engine: AsyncEngine, requests: Sequence[TextRequest], deadline: float | None
) -> list[SequenceOutput]:
    """Run requests that have the same tokenizer to their end.

    Returns their outputs. Raises like ``AsyncEngine.stream``.
    """
    timeout = None if deadline is None else deadline - time.monotonic()
    if timeout is not None and timeout <= 0:
        raise DeadlineExceeded("The request timed out before all of its input was processed.")
    outputs = [SequenceOutput() for _ in requests]
    async with aclosing(engine.stream(*(replace(request, timeout=timeout) for request in requests))) as stream:
        async for deltas in stream:
            for delta in deltas:
                outputs[delta.prompt].add(delta)
    return outputs


def usage_of(output: SequenceOutput) -> Usage:
    """Return the token counts of a sequence. Raises EngineError if the sequence was cut off."""
    if output.finish is None or output.finish.reason is FinishReason.ABORT or not output.finish.usage.completion:
        raise EngineError("The engine aborted a part of the request.")
    return output.finish.usage
