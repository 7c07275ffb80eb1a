"""Cost of carrying a token through a fleet: processor time between a replica's frame and the client's messages.

    python -m benchmarks.fleet.frame_cost [--rows 16] [--steps 5000]

One replica that computes nothing sends frames of one token for each of its sequences, as an engine's step does. Told
are microseconds of processor time for each token, and for each submitted sequence of 512 tokens, beside those of
msgpack and the message classes, which the server without a fleet needs too.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any

from rootgraft.engine.messages import Heartbeat, Message, Ready, Submit, TokenOut, decode, encode
from rootgraft.engine.types import AdapterInfo, SamplingParams
from rootgraft.fleet.fleet import Fleet

READY = Ready(8192, 50_000, 4096, 16, (), base_digest="base")
PROMPT_TOKENS = 512


class SilentReplica:
    """A replica that takes messages and says nothing of its own accord."""

    silent_seconds = 0.0
    place = "nowhere"

    def __init__(self) -> None:
        self.stats: dict[str, float] = {}
        self.adapters: dict[str, AdapterInfo] = {}
        self.numbers: list[int] = []
        self.on_frame: Any = None
        self.on_heartbeat: Any = None
        self.on_death: Any = None

    async def launch(self) -> tuple[Any, Ready]:
        return self, READY

    async def stop(self, client: Any) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def submit(self, submits: Sequence[Submit]) -> None:
        self.numbers += [submit.id for submit in submits]

    def kill(self) -> None:
        """Do nothing."""


async def measure(rows: int, steps: int) -> dict[str, float]:
    """Return microseconds by what they were spent on."""
    replica = SilentReplica()
    fleet = Fleet(replica, 1)
    taken: list[list[Message]] = []
    fleet.on_frame = taken.append
    await fleet.start()
    params = SamplingParams(max_tokens=steps + 1)
    submits = [Submit(each, array("i", range(each, each + PROMPT_TOKENS)), params) for each in range(rows)]
    began = time.thread_time()
    for submit in submits:
        fleet.submit([submit])
    submitted = time.thread_time() - began
    frames: list[list[Message]] = [[TokenOut(each, (step,)) for each in replica.numbers] for step in range(steps)]
    began = time.thread_time()
    for frame in frames:
        replica.on_frame(frame)
    carried = time.thread_time() - began
    assert len(taken) == steps and all(len(frame) == rows for frame in taken)
    encoded = [encode(frame) for frame in frames]
    began = time.thread_time()
    for data in encoded:
        decode(data)
    decoded = time.thread_time() - began
    began = time.thread_time()
    for _ in range(100):
        replica.on_heartbeat(Heartbeat({f"number_{each}": 1.0 for each in range(80)}, {}))
    beaten = time.thread_time() - began
    await fleet.close()
    tokens = rows * steps
    return {
        "a token through the fleet": carried / tokens * 1e6,
        "a token decoded, with and without a fleet": decoded / tokens * 1e6,
        "a sequence submitted": submitted / rows * 1e6,
        "a heartbeat, four a second": beaten / 100 * 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args()
    for what, microseconds in asyncio.run(measure(options.rows, options.steps)).items():
        print(f"{microseconds:8.2f} us  {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
