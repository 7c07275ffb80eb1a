"""Peer reads: KV that waiting sequences get from other replicas, the tier ``peer``.

If another replica has the prefix of a sequence (``Submit.peer_tokens``), the sequence asks for the pages that no tier
here has. It waits, without delaying others, until the pages arrive, or the other replica has no more or is gone, or too
much time has passed. Arrived pages are kept in the host's memory until a lease takes them. They are named by their
content, like pages on disk, so pages of another base model, adapter, salt or form of KV are a miss.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...radix.namespace import Path
from ..messages.kv_transfers import FetchKv, KvBlocks
from .block_codec import BlockCodec, NotABlock
from .kv_stores import HostStore

logger = logging.getLogger("rootgraft.kv")

ANSWER_SECONDS = 10.0
"""From one part of an answer to the next, after which a sequence waits no more."""


class PeerQuestion(NamedTuple):
    """A question that is not answered yet: the key of its first page, and how long its sequence waits."""

    key: bytes
    until: float


class PeerReads:
    """Requests of one engine's waiting sequences for pages, and the pages received. Called by the core's thread.

    Args:
        codec: codec of the blocks, without a key.
        capacity: limit on the bytes of received pages that no lease has taken yet.
        clock: seconds, monotonic.

    Attributes:
        store: tier with those pages, to read from.
    """

    def __init__(self, codec: BlockCodec, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = HostStore(capacity, clock, "peer")
        self._codec = codec
        self._clock = clock
        # By sequence: the tokens whose KV another replica has, as the fleet said.
        self._expected: dict[int, int] = {}
        self._asked: dict[int, PeerQuestion] = {}  # by sequence
        self._to_send: list[FetchKv] = []

    @property
    def is_idle(self) -> bool:
        """Whether no sequence may ask or waits, and no page has come that no lease has taken."""
        return not self._expected and not self._asked and self.store.is_empty

    def expect(self, number: int, num_tokens: int) -> None:
        """Note that another replica is likely to have the first tokens of a sequence, which asks for them once."""
        self._expected[number] = num_tokens

    def waits(self, number: int) -> bool:
        """Return whether a sequence waits for an answer."""
        asked = self._asked.get(number)
        if asked is not None and asked.until < self._clock():
            del self._asked[number]
            asked = None
        return asked is not None

    def ask(self, number: int, path: Path, tokens: array[int], keys: list[bytes], first: int) -> bool:
        """Ask for the missing pages of a sequence. Returns whether it waits for an answer.

        If another sequence has already asked for the same pages, no second request is sent: this sequence waits for
        that answer.

        Args:
            tokens: the tokens of the sequence.
            keys: keys of the whole pages that the sequence can use.
            first: index of the first page that is not here.
        """
        size = self._codec.scheme.page_size
        if first < len(keys) and self._is_asked(keys[first]):
            return True
        end = min(len(keys), self._expected.pop(number, 0) // size)
        if end <= first:
            return False
        self._asked[number] = PeerQuestion(keys[first], self._clock() + ANSWER_SECONDS)
        self._to_send.append(FetchKv(number, path, tokens[: end * size], first))
        return True

    def _is_asked(self, key: bytes) -> bool:
        """Return whether a sequence waits for a page and those after it."""
        return any(each.key == key and self.waits(number) for number, each in tuple(self._asked.items()))

    def take(self, message: KvBlocks) -> None:
        """Store pages that came. One that is damaged, or of another form of KV, is dropped."""
        faults = []
        for data in message.blocks:
            try:
                self.store.put(*self._codec.read(data, ""))
            except NotABlock as fault:
                faults.append(fault)
        if faults:
            logger.warning("%d KV pages of another replica were not used: %s", len(faults), faults[0])
        if (asked := self._asked.get(message.id)) is not None:
            if message.is_last:
                del self._asked[message.id]
            else:
                self._asked[message.id] = asked._replace(until=self._clock() + ANSWER_SECONDS)

    def take_requests(self) -> list[FetchKv]:
        """Return the questions since the last call."""
        requests, self._to_send = self._to_send, []
        return requests

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget sequences that have ended, or have what they need."""
        for number in numbers:
            self._expected.pop(number, None)
            self._asked.pop(number, None)

    def reset(self) -> None:
        """Forget all sequences. Pages that came stay."""
        self._expected.clear()
        self._asked.clear()
        self._to_send.clear()
