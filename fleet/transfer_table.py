"""Transfer table: the reads of KV from one replica for another that are under way, as a gateway relays them.

    target --FetchKv--> gateway --ReadKv--> source --KvBlocks--> gateway --KvBlocks--> target

Whatever becomes of the source, the target gets a last answer, and computes what it has not got.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from ..engine.messages import KvBlocks
from .kv_handover import KvHandover


@dataclass(frozen=True, slots=True)
class Transfer:
    """A read: from whom, for whom, and the number of the sequence there that asked; 0 if none did."""

    source: str
    target: str
    number: int


class TransferTable:
    """Transfers by the number that their source answers with.

    Args:
        most: at one time, which bounds the memory of what is on its way.

    Attributes:
        handover: those among them that no replica has asked for, and those planned.
    """

    def __init__(self, most: int) -> None:
        self.handover = KvHandover()
        self._most = most
        self._numbers = itertools.count(1)
        self._transfers: dict[int, Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def begin(self, source: str, target: str, number: int) -> int | None:
        """Note a read. Returns its number; None if there are too many."""
        if len(self._transfers) >= self._most:
            return None
        ticket = next(self._numbers)
        self._transfers[ticket] = Transfer(source, target, number)
        return ticket

    def forward(self, source: str, message: KvBlocks) -> tuple[str, KvBlocks] | None:
        """Return what to send to whom of a source's answer; None if nobody waits for it any more."""
        transfer = self._transfers.get(message.id)
        if transfer is None or transfer.source != source:
            return None
        if message.is_last:
            del self._transfers[message.id]
        return transfer.target, replace(message, id=transfer.number)

    def adopt(self, ticket: int, target: str, number: int) -> bool:
        """Let the rest of a read answer a sequence of its target that asks for it. False if it has ended."""
        transfer = self._transfers.get(ticket)
        if transfer is None or transfer.target != target:
            return False
        self._transfers[ticket] = replace(transfer, number=number)
        return True

    def leave(self, name: str) -> list[tuple[str, KvBlocks]]:
        """Forget a replica. Returns the last answers to those that waited for it."""
        self.handover.leave(name)
        ended = [(ticket, each) for ticket, each in self._transfers.items() if name in (each.source, each.target)]
        for ticket, _ in ended:
            del self._transfers[ticket]
        return [(each.target, KvBlocks(each.number, (), True)) for _, each in ended if each.target != name]

    def reads_from(self, name: str) -> bool:
        """Return whether KV of a replica is being read for another one."""
        return any(each.source == name for each in self._transfers.values())
