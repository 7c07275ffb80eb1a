"""Peers that come and go or stay half-open, by WebSocket, gRPC and events: nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import grpc
import psutil
import pytest
from support.api.api_live import Live
from support.api.children.dropped_child import WAVE, Kept, measure
from support.api.dropped_peers import (
    ASKED,
    METHOD,
    PREFACE,
    WAYS,
    call,
    connected,
    frame,
    head,
    neighbours,
    socket_frame,
    upgrade,
    upgraded,
)
from support.api.rpc_live import RpcClient, chat_request, rpc_of
from support.machine.thoroughness import taking_turns
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.http import connection

MANY = taking_turns([*WAYS], 3)
# A thousand connections of the kind whose turn it is, and few of the others.
WAVES = [
    *(pytest.param(way, 40, marks=pytest.mark.heavy) for way in MANY),
    *(pytest.param(way, 2, marks=[pytest.mark.sample] if way in MANY else []) for way in WAYS),
]
CHANNEL = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]


@pytest.mark.parametrize(("way", "waves"), WAVES)
def test_those_that_are_dropped_in_the_middle(way: str, waves: int) -> None:
    """A thousand of them leave descriptors, objects and memory as they were, and neighbours with the same bytes."""
    context = multiprocessing.get_context("spawn")
    told, end = context.Pipe(duplex=False)
    child = context.Process(target=measure, args=(way, waves, end))
    child.start()
    end.close()
    with told:
        before, after = (Kept(*each) for each in json.loads(told.recv_bytes()))
    child.join(HANG_SECONDS)
    assert child.exitcode == 0
    count = waves * WAVE
    # A connection has a hundred of them; the fake engine keeps a few for each request.
    assert after.objects - before.objects < 1000 + 4 * count, f"{before} and {after} after {count} connections"
    assert after.memory - before.memory < 16 << 20, f"{before} and {after} after {count} connections"


def test_half_open_peers_keep_nobody_waiting(live: Live) -> None:
    """They say nothing, a part of a handshake, or a part of a message; a request of theirs ends with the connection."""
    masked = socket_frame(ASKED)
    grpc_parts = (b"", PREFACE[:9], PREFACE, PREFACE + frame(4, 0, 0), PREFACE + frame(4, 0, 0) + head(), call()[:-5])
    with rpc_of(live) as rpc, neighbours(live, rpc) as answers:
        wanted = answers()
        descriptors = psutil.Process().num_fds()
        with ExitStack() as stack:
            for _ in range(8):
                for part in grpc_parts:
                    stack.enter_context(connected(rpc.server.port, part))
                for part in (b"", b"\x81", masked[:1] + b"\xfe\x10", masked[:9], masked[:-1], b"\x01\x81" + bytes(5)):
                    stack.enter_context(upgraded(live, part))
                stack.enter_context(connected(urlsplit(live.url).port or 0, upgrade()[:-2]))
            assert answers() == wanted
        wait_until(lambda: live.state.limits.active == 0 and live.state.sockets.connections.total == 1)
        wait_until(lambda: psutil.Process().num_fds() <= descriptors + 2)
        assert answers() == wanted


def test_a_peer_that_answers_no_ping_is_taken_for_gone(serve_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a cable that was drawn: its request does not go on for nobody."""
    monkeypatch.setattr(connection, "PING_SECONDS", 0.1)
    live: Live = serve_with(None)
    live.async_engine.gate = asyncio.Event()
    with upgraded(live, socket_frame(ASKED)):
        wait_until(lambda: len(live.async_engine.aborted) == 1)
        wait_until(lambda: live.state.limits.active == 0 and live.state.sockets.connections.total == 0)


def test_a_method_that_is_no_text_closes_the_port_for_nobody(live: Live) -> None:
    """The library's own server would end at it: it is unknown as others are, and a call that runs goes on."""
    with rpc_of(live) as rpc:
        live.async_engine.gate = gate = asyncio.Event()
        going = rpc.stream(METHOD, chat_request("hi"), "rootgraft.v1.GenerateChunk")
        wait_until(lambda: live.state.limits.active == 1)
        for _ in range(20):
            with connected(rpc.server.port, call().replace(b"Generation/", b"Generati\xf2n/")) as sock:
                told = b""
                while b"Method not found" not in told:
                    told += (part := sock.recv(4096))
                    assert part, "the server has closed the connection"
        live.async_engine.gate = None
        with grpc.insecure_channel(rpc.address, CHANNEL) as channel:
            later = RpcClient(channel, live, rpc.address, rpc.server)
            texts = [each.text for each in later.stream(METHOD, chat_request("hi"), "rootgraft.v1.GenerateChunk")]
        live.loop.call_soon_threadsafe(gate.set)
        assert "".join(texts) == "".join(each.text for each in going) == "answer 0"
