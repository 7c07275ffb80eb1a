"""Request cost: time of the API process for a chat, from the bytes of HTTP to the engine's frame and back.

    python benchmarks/serve/request_cost.py --together 32
    python benchmarks/serve/request_cost.py --together 16 --system-words 1100

Requests that arrive in one turn of the event loop go through the whole server but its sockets: protocol, routes, chat
template, tokenizer, client of the engine. Frames of the engine, as of steps with a token for each, then go back. There
is no access log. The table shows microseconds a request, and for a chunk of a stream microseconds a chunk: the least of
the repeats and their median. To compare two checkouts, run it in both in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import orjson  # noqa: E402
import uvicorn  # noqa: E402
import uvloop  # noqa: E402
from uvicorn.server import ServerState as Connections  # noqa: E402

from rootgraft.api.cli.bench_requests import words  # noqa: E402
from rootgraft.api.config import ServerConfig  # noqa: E402
from rootgraft.api.generate.server_state import ServerState  # noqa: E402
from rootgraft.api.http.app import create_app  # noqa: E402
from rootgraft.api.http.connection import Connection, uvicorn_options  # noqa: E402
from rootgraft.api.observe.engine_facts import EngineFacts  # noqa: E402
from rootgraft.api.observe.log import set_up_log  # noqa: E402
from rootgraft.engine import process_memory  # noqa: E402
from rootgraft.engine.checkpoint.locate import resolve_model  # noqa: E402
from rootgraft.engine.config import EngineConfig  # noqa: E402
from rootgraft.engine.ipc import FrameReader, frame  # noqa: E402
from rootgraft.engine.messages import Done, Message, Ready, Submit, TokenOut, decode, encode  # noqa: E402
from rootgraft.engine.serving.async_engine import AsyncEngine  # noqa: E402
from rootgraft.engine.serving.engine_client import EngineClient  # noqa: E402
from rootgraft.engine.text.tokenizer import Tokenizer  # noqa: E402
from rootgraft.engine.types import FinishReason, SequenceStats, Usage  # noqa: E402

STAGES = ("submit", "first chunk", "chunk", "end")
_TURNS = 6  # Turns of the event loop within which all chunks of a frame are written.


class EngineEnd(asyncio.Transport):
    """The engine's end of the channel.

    Attributes:
        written: time of the last write.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reader = FrameReader()
        self._frames: list[bytes] = []
        self.written = 0.0

    def write(self, data: Any) -> None:
        self.written = time.perf_counter()
        self._frames += self._reader.feed(data)

    def is_closing(self) -> bool:
        return False

    def take(self) -> list[int]:
        """Return the ids of the sequences that were submitted since the last call."""
        frames, self._frames = self._frames, []
        return [message.id for each in frames for message in decode(each) if isinstance(message, Submit)]


class ClientEnd(asyncio.Transport):
    """A client's connection, which drops what it is sent."""

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class ApiProcess:
    """An API process whose engine is this benchmark."""

    def __init__(self) -> None:
        config, files = EngineConfig(), resolve_model(None)
        tokenizer = Tokenizer.load(files.path)
        ready = Ready(8192, tokenizer.vocab_size, num_pages=1000, page_size=16, summary=())
        self.engine_end = EngineEnd()
        self.client = EngineClient(config, files.path)
        self.client._ready = asyncio.get_running_loop().create_future()
        self.client._ready.set_result(ready)
        self.client.connection_made(self.engine_end)
        self.engine = AsyncEngine(self.client, tokenizer, ready)
        state = ServerState.open(ServerConfig(), "benchmark")
        state.begin_loading(("model",), self.client, finds_adapters=False)
        state.begin_serving(self.engine, self.client, EngineFacts.of(config, ready))
        self._settings = uvicorn.Config(create_app(state), **uvicorn_options())
        self._settings.load()
        self._connections = Connections()

    def connect(self) -> Connection:
        connection = Connection(self._settings, self._connections, {})
        connection.connection_made(ClientEnd())
        return connection

    def receive(self, messages: Sequence[Message]) -> None:
        """Take a frame of the engine's."""
        self.client.data_received(frame(encode(messages)))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def measure(process: ApiProcess, requests: Sequence[bytes], steps: int, rng: Random) -> tuple[float, ...]:
    """Return the microseconds of each stage, for each request or chunk."""
    count = len(requests)
    connections = [process.connect() for _ in requests]
    await asyncio.sleep(0.005)
    times = [time.perf_counter()]
    for connection, request in zip(connections, requests, strict=True):
        connection.data_received(request)
    while process.engine.num_running < count:
        await asyncio.sleep(0)
    await asyncio.sleep(0.005)  # in which those that are held are sent
    ids, submitted = process.engine_end.take(), process.engine_end.written
    drawn = [[TokenOut(number, (rng.randrange(300, 40_000),)) for number in ids] for _ in range(steps)]
    end = [
        Done(number, FinishReason.LENGTH, Usage(100, 0, steps), None, SequenceStats(0, 0, 1, 0, 8, 7)) for number in ids
    ]
    spans = [submitted - times[0]]
    for messages in ([drawn[0]], drawn[1:], [end]):
        began = time.perf_counter()
        for each in messages:
            process.receive(each)
            await turns(_TURNS)
        spans.append(time.perf_counter() - began)
    while process.engine.num_running or not all(each.cycle.response_complete for each in connections):
        await asyncio.sleep(0)
    for connection in connections:
        connection.connection_lost(None)
    chunks = (1, 1, steps - 1, 1)
    return tuple(span / count / each * 1e6 for span, each in zip(spans, chunks, strict=True))


def chat(rng: Random, system: str) -> bytes:
    """Return a request of HTTP for a streamed chat."""
    messages = [{"role": "system", "content": system}] * bool(system)
    messages.append({"role": "user", "content": f"{rng.random()} {words(rng, 80)}"})
    options = {"max_tokens": 128, "temperature": 1.0, "seed": rng.randrange(1 << 31), "stream": True}
    body = orjson.dumps({"model": "model", "messages": messages, **options, "stream_options": {"include_usage": True}})
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def run(options: argparse.Namespace) -> None:
    process, rng = ApiProcess(), Random(options.seed)
    system = words(rng, options.system_words) if options.system_words else ""
    found = []
    for repeat in range(-3, options.repeats):
        if repeat == 0:
            process_memory.freeze()
        requests = [chat(rng, system) for _ in range(options.together)]
        taken = await measure(process, requests, options.steps, rng)
        found += [taken] * (repeat >= 0)
    for stage, values in zip(STAGES, zip(*found, strict=True), strict=True):
        print(f"{stage:12s} {min(values):8.1f} {median(values):8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--together", type=int, default=32, help="requests in one turn of the event loop")
    parser.add_argument("--system-words", type=int, default=0, help="words of a system prompt that all requests share")
    parser.add_argument("--steps", type=int, default=40, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    set_up_log("warning", "text")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
