"""Gathers requests that come together, so that an idle engine does not begin the first of them alone.

Of 32 requests at once it would compute the first in a step that takes half as long as one with five prompts, and then a
token of it in a step of its own, while the others are parsed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from ..messages import Done, Failed, Message, Submit

GATHER_SECONDS = 0.004
"""For which a sequence is held at most while others come."""
_ROUNDS = 5  # rounds of the event loop from the bytes of a request to its sequences


class SubmitGatherer:
    """Holds sequences for an engine that has no others, while more come. Belongs to one event loop.

    The sequences of a request that comes alone are held for five rounds of the event loop, some 60 us.

    Args:
        send: called once for all that are held; it takes them by ``take``.
        clock: seconds, monotonic.
    """

    def __init__(self, send: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._open: set[int] = set()  # ids of sequences that have not ended
        self._held: list[Submit] = []
        self._due = 0.0  # when the held ones are sent at the latest, on the loop's clock
        self._rounds = 0  # rounds since the last one was added

    def add(self, submits: Sequence[Submit]) -> None:
        """Send sequences: at once, or with others that come now."""
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
        """Return what is held, and hold it no longer."""
        held, self._held = self._held, []
        return held

    def see(self, messages: Iterable[Message]) -> None:
        """Take note of the sequences that have ended."""
        self._open.difference_update([message.id for message in messages if isinstance(message, (Done, Failed))])

    def _wait(self) -> None:
        """Send what is held if nothing has come for some rounds of the event loop, else look again in the next one."""
        if not self._held:
            return
        self._rounds += 1
        if self._rounds > _ROUNDS or self._clock() >= self._due:
            self._send()
        else:
            asyncio.get_running_loop().call_soon(self._wait)
