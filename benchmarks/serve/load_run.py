"""One repeat of a workload on a server: all its requests sent, timed, and their answers checked against schemas."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from benchmarks.serve.schemas import is_valid
from benchmarks.serve.server import processor_seconds
from benchmarks.serve.workloads import Conversation, Workload
from rootgraft.api.cli.bench_report import summarise
from rootgraft.api.cli.remote_server import RemoteError, RemoteServer, Timing, timed

PATH = "chat/completions"
_WARM_UP = [{"messages": [{"role": "user", "content": f"Say {count} words."}], "max_tokens": 16} for count in range(4)]


@dataclass(frozen=True, slots=True)
class Adapters:
    """How a server's requests ask for adapters: by name in ``model``, or by number as llama.cpp takes them."""

    names: Sequence[str]
    by_number: bool = False

    def field(self, adapter: int | None) -> dict[str, Any]:
        """Return the field that asks for an adapter, or for the base model."""
        if self.by_number and self.names:
            return {"lora": [{"id": adapter or 0, "scale": 0.0 if adapter is None else 1.0}]}
        return {} if adapter is None else {"model": self.names[adapter]}


@contextlib.asynccontextmanager
async def connected(url: str, process: subprocess.Popen[bytes] | None, limit: float) -> AsyncIterator[RemoteServer]:
    """Yield a client once the server has given a whole answer, and four more at once.

    Every request has a connection of its own: llama.cpp's server closes idle ones while the next request is sent.

    Args:
        limit: seconds until the first answer.

    Raises:
        RemoteError: no answer in this time, or the process has ended.
    """
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        read_bufsize=1 << 18,
    ) as session:
        remote = RemoteServer(session, URL(url), "")
        try:
            async with asyncio.timeout(limit):
                while not await _answers(remote):
                    if process is not None and process.poll() is not None:
                        raise RemoteError("ended", f"it ended with exit code {process.returncode}")
                    await asyncio.sleep(0.2)
        except TimeoutError as error:
            raise RemoteError("no answer", f"it gave no answer within {limit:.0f} s") from error
        yield remote


async def _answers(remote: RemoteServer) -> bool:
    with contextlib.suppress(RemoteError, LookupError):
        remote.model = str((await remote.get("models"))["data"][0]["id"])
        return (await timed(remote, PATH, _WARM_UP[0])).error is None
    return False


async def warm_up(remote: RemoteServer) -> None:
    """Let the server answer four requests at once."""
    await asyncio.gather(*(timed(remote, PATH, body) for body in _WARM_UP))


async def run_repeat(
    remote: RemoteServer,
    load: Workload,
    temperature: float,
    adapters: Adapters,
    process: subprocess.Popen[bytes] | None = None,
) -> dict[str, Any]:
    """Return the figures of one repeat.

    All servers draw from the same distribution: the filters that some of them apply by default are off.

    Args:
        process: the server's first one, for its processor time.
    """
    fields = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    before = {} if process is None else processor_seconds(process)
    begin = time.perf_counter()
    timings, valid = await _run(remote, load, adapters, fields)
    seconds = time.perf_counter() - begin
    after = {} if process is None or process.poll() is not None else processor_seconds(process)
    asked = sum(len(each.turns) for each in load.conversations if each.schema is not None)
    return summarise(timings) | {
        "valid": valid,
        "with_schema": asked,
        "seconds": seconds,
        "load_average": os.getloadavg(),
        "processor_s": {part: after[part] - before[part] for part in after},
    }


async def _run(
    remote: RemoteServer, load: Workload, adapters: Adapters, fields: dict[str, Any]
) -> tuple[list[Timing], int]:
    """All conversations of a load, and how many answers follow their schema. One that fails ends there."""
    limit = asyncio.Semaphore(load.concurrency)
    timings: list[Timing] = []
    valid = 0

    async def talk(conversation: Conversation) -> None:
        nonlocal valid
        messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
        body = conversation.fields | fields | adapters.field(conversation.adapter)
        async with limit:
            for turn in conversation.turns:
                messages.append({"role": "user", "content": turn})
                pieces: list[str] = []
                timing = await timed(remote, PATH, {"messages": messages, **body}, pieces.append)
                timings.append(timing)
                if timing.error is not None:
                    return
                answer = "".join(pieces)
                messages.append({"role": "assistant", "content": answer})
                valid += conversation.schema is not None and is_valid(answer, conversation.schema)

    await asyncio.gather(*map(talk, load.conversations))
    return timings, valid
