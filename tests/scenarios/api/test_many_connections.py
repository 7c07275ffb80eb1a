"""A thousand connections at once, by WebSockets, event streams and gRPC: all are answered, and all is given back."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest
from support.api.api_live import Live
from support.api.rpc_live import GENERATION, chat_request, rpc_of
from support.machine.waits import HANG_SECONDS, wait_until
from websockets.asyncio.client import connect

from rootgraft.api.config import ServerConfig
from rootgraft.api.rpc.messages import message

SOCKETS, STREAMS, CALLS = 500, 400, 100
COUNTS = [pytest.param(20, marks=pytest.mark.sample), pytest.param(1, marks=pytest.mark.heavy)]
"""By how much the numbers of connections are divided."""
HI = [{"role": "user", "content": "hi"}]
DESCRIPTORS = 4096


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Both ends of all connections are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS:
        pytest.skip(f"this process may not have {DESCRIPTORS} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, DESCRIPTORS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def over_socket(url: str) -> str:
    text = ""
    patience: dict[str, Any] = {"open_timeout": HANG_SECONDS, "close_timeout": HANG_SECONDS, "ping_interval": None}
    async with connect(url.replace("http", "ws") + "/v1/stream", proxy=None, **patience) as sock:
        await sock.send(json.dumps({"type": "generate", "id": "a", "messages": HI}))
        while (event := json.loads(await sock.recv()))["type"] == "token":
            text += event["text"]
    assert event["finish_reason"] == "stop", event
    return text


async def over_events(url: str) -> str:
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"messages": HI, "stream": True})
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json"
    )
    writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    text = ""
    async for line in reader:
        if line.startswith(b"data: {"):
            text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    writer.close()
    await writer.wait_closed()
    return text


async def over_rpc(address: str) -> str:
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    kind = message("rootgraft.v1.GenerateChunk")
    async with grpc.aio.insecure_channel(address, options) as channel:
        call = channel.unary_stream(f"{GENERATION}/Generate", lambda each: each.SerializeToString(), kind.FromString)
        return "".join([piece.text async for piece in call(chat_request("hi"), timeout=HANG_SECONDS)])


@pytest.mark.parametrize("divided", COUNTS)
@pytest.mark.usefixtures("descriptors")
def test_all_are_answered_and_given_back(serve_with: Any, divided: int) -> None:
    live: Live = serve_with(ServerConfig(max_websockets=SOCKETS, max_queued_requests=2048))
    sockets, streams, calls = SOCKETS // divided, STREAMS // divided, CALLS // divided
    process = psutil.Process()
    with rpc_of(live) as rpc:
        address = rpc.address
        asyncio.run(over_rpc(address))
        before = process.num_fds()
        live.async_engine.gate = gate = asyncio.Event()

        async def together() -> list[str]:
            jobs = [over_socket(live.url) for _ in range(sockets)]
            jobs += [over_events(live.url) for _ in range(streams)]
            jobs += [over_rpc(address) for _ in range(calls)]
            going = [asyncio.create_task(job) for job in jobs]
            while live.state.limits.active < len(going):
                for each in going:
                    assert not each.done(), each
                await asyncio.sleep(0.01)
            # All of them are there at once; now they are answered.
            assert process.num_fds() >= before + 2 * len(going)
            with live.http() as http:
                assert http.get("/health/live").status_code == 200
            live.loop.call_soon_threadsafe(gate.set)
            return list(await asyncio.gather(*going))

        assert asyncio.run(together()) == ["answer 0"] * (sockets + streams + calls)
        wait_until(lambda: live.state.limits.active == 0 and live.state.sockets.connections.total == 0)
        wait_until(lambda: process.num_fds() <= before + 10)
