"""Submit gatherer: holds requests that arrive together, so that an idle engine does not start with only the first one.

Without it, an engine that receives 32 requests at once would compute the first prompt alone, in a step that takes half
as long as a step with five prompts, and then one more token of it, while the other requests are still being parsed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from ..messages import Done, Failed, Message, Submit

GATHER_SECONDS = 0.004
"""Longest time in seconds for which a sequence is held while others arrive."""
_ROUNDS = 5  # Number of event loop rounds between the arrival of a request's bytes and the submission of its sequences.


class SubmitGatherer:
    """Holds sequences for an idle engine while more arrive. Belongs to one event loop.

    The sequences of a request that arrives alone are held for five rounds of the event loop, about 60 us.

    Args:
        send: called when the held sequences are to be sent; it must fetch them by ``take``.
        clock: returns monotonic time in seconds.
    """

    def __init__(self, send: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._open: set[int] = set()  # Ids of the sequences that have not ended.
        self._held: list[Submit] = []
        self._due = 0.0  # Latest time at which the held sequences are sent, by ``clock``.
        self._rounds = 0  # Number of event loop rounds since the last sequence was added.

    def add(self, submits: Sequence[Submit]) -> None:
        """Send sequences: at once if the engine is busy, else together with those that arrive within
        ``GATHER_SECONDS``.
        """
        is_idle = len(self._open) == len(self._held)
        self._open.update(submit.id for submit in submits)
        if is_idle and not self._held:
            self._due = self._clock() + GATHER_SECONDS
            asyncio.get_running_loop().call_soon(self._wait)
        self._held += submits
        self._rounds = 0
        if not is_idle or self._clock() >= self._due:
            self._send()

    def take(self) -> list[Submit]:
        """Return the held sequences and remove them."""
        held, self._held = self._held, []
        return held

    def see(self, messages: Iterable[Message]) -> None:
        """Record which sequences have ended, from the engine's messages."""
        self._open.difference_update([message.id for message in messages if isinstance(message, (Done, Failed))])

    def _wait(self) -> None:
        """Send the held sequences if none has arrived for some rounds of the event loop; else check again later."""
        if not self._held:
            return
        self._rounds += 1
        if self._rounds > _ROUNDS or self._clock() >= self._due:
            self._send()
        else:
            asyncio.get_running_loop().call_soon(self._wait)
