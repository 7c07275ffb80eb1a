"""Transfer table: running reads of KV from one replica for another, which the gateway relays.

    target --FetchKv--> gateway --ReadKv--> source --KvBlocks--> gateway --KvBlocks--> target

If the source fails, the target still gets a last answer, so that it computes the KV that it has not received.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from ..engine.messages import KvBlocks
from .kv_handover import KvHandover


@dataclass(frozen=True, slots=True)
class Transfer:
    """A read: its source, its target, and the number of the sequence on the target that requested it; 0 for none."""

    source: str
    target: str
    number: int


class TransferTable:
    """The running reads of KV, by the id of the ``ReadKv`` to the source, which the source's answers repeat.

    Args:
        most: largest number of reads at one time, which limits the memory of KV in transit.

    Attributes:
        handover: copies of prefixes from draining replicas and to joining ones, planned or running, which their targets
            have not requested.
    """

    def __init__(self, most: int) -> None:
        self.handover = KvHandover()
        self._most = most
        self._numbers = itertools.count(1)
        self._transfers: dict[int, Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def begin(self, source: str, target: str, number: int) -> int | None:
        """Record a read. Returns its number; None if there are too many."""
        if len(self._transfers) >= self._most:
            return None
        ticket = next(self._numbers)
        self._transfers[ticket] = Transfer(source, target, number)
        return ticket

    def forward(self, source: str, message: KvBlocks) -> tuple[str, KvBlocks] | None:
        """Return the receiver of a source's answer and the message for it; None if no replica waits for it any more."""
        transfer = self._transfers.get(message.id)
        if transfer is None or transfer.source != source:
            return None
        if message.is_last:
            del self._transfers[message.id]
        return transfer.target, replace(message, id=transfer.number)

    def adopt(self, ticket: int, target: str, number: int) -> bool:
        """Let the rest of a read answer a sequence of its target that requests it. False if the read has ended."""
        transfer = self._transfers.get(ticket)
        if transfer is None or transfer.target != target:
            return False
        self._transfers[ticket] = replace(transfer, number=number)
        return True

    def leave(self, name: str) -> list[tuple[str, KvBlocks]]:
        """Forget a replica. Returns the last answers for the replicas that waited for it."""
        self.handover.leave(name)
        ended = [(ticket, each) for ticket, each in self._transfers.items() if name in (each.source, each.target)]
        for ticket, _ in ended:
            del self._transfers[ticket]
        return [(each.target, KvBlocks(each.number, (), True)) for _, each in ended if each.target != name]

    def reads_from(self, name: str) -> bool:
        """Return whether KV is being read from a replica for another one."""
        return any(each.source == name for each in self._transfers.values())
