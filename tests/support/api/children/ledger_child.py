"""A process that writes a usage ledger until it is killed, and says what it was told to be in the file."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path

from rootgraft.api.observe.usage_ledger import UsageLedger, UsageRecord

DAYS = 1_700_000_000.0, 1_700_086_400.0


def record(round_: int, number: int) -> UsageRecord:
    """The record of this number, which follows from it alone."""
    cached = number % 5
    return UsageRecord(
        f"{round_}-{number}", DAYS[number % 2], f"key-{number % 3}", f"m{number % 2}", number + 5, cached, number % 7
    )


def write(path: Path, round_: int, told: Connection) -> None:
    """Write the records of a round without an end, and send the number of each whose write has returned."""
    asyncio.run(_write(path, round_, told))


async def _write(path: Path, round_: int, told: Connection) -> None:
    ledger = UsageLedger(path)
    numbers = iter(range(10**9))

    async def writer() -> None:
        for number in numbers:
            await ledger.until_written(ledger.put(record(round_, number)))
            told.send(number)

    await asyncio.gather(*(writer() for _ in range(8)))
