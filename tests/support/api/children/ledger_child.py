"""A process that writes a usage ledger until it is killed, and says what it was told to be in the file.

python ledger_child.py FILE ROUND       a line for each record whose write has returned
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rootgraft.api.observe.usage_ledger import UsageLedger, UsageRecord

DAYS = 1_700_000_000.0, 1_700_086_400.0


def record(round_: int, number: int) -> UsageRecord:
    """The record of this number, which follows from it alone."""
    cached = number % 5
    return UsageRecord(
        f"{round_}-{number}", DAYS[number % 2], f"key-{number % 3}", f"m{number % 2}", number + 5, cached, number % 7
    )


async def main(path: str, round_: int) -> None:
    ledger = UsageLedger(Path(path))
    numbers = iter(range(10**9))

    async def writer() -> None:
        for number in numbers:
            await ledger.until_written(ledger.put(record(round_, number)))
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()

    await asyncio.gather(*(writer() for _ in range(8)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
