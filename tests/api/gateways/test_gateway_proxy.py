"""Connections to a gateway: its own answers and those of the main process are in order, each its own request's."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator

import pytest
from support.api.api_live import make_state, run_app
from support.api.wire.connection_asks import LIMIT, OPTIONS, asked, check_order
from support.api.wire.raw_http import Wire, chunked, request
from support.machine.waits import HANG_SECONDS

from rootgraft.api.gateways.gateway_proxy import GatewayProxy
from rootgraft.api.http.app import create_app


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a gateway that passes on what it does not answer itself, as any does."""
    path = str(tmp_path_factory.mktemp("main") / "socket")
    with socket.socket(socket.AF_UNIX) as main, socket.create_server(("127.0.0.1", 0)) as sock:
        main.bind(path)
        main.listen()
        proxy = GatewayProxy(create_app(make_state(OPTIONS)), path, "")
        with run_app(create_app(make_state(OPTIONS)), main), run_app(proxy, sock) as loop:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
            asyncio.run_coroutine_threadsafe(proxy.close(), loop).result(HANG_SECONDS)


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_in_order_however_requests_are_cut(url: str, seed: int) -> None:
    """What is too large does not end the connection here: the gateway takes the rest of it."""
    check_order(url, random.Random(seed), ("close", "broken"))


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_what_is_refused_before_its_body_has_come(url: str, path: str) -> None:
    """The answer of the main process is the client's, though it comes while the body is still being passed on."""
    for sent in (
        request("a", "POST", path, headers={"Content-Length": str(64 << 20)}) + b"x" * 65536,
        request("a", "POST", path, chunks=chunked(b"x" * LIMIT * 20, 1000)),
    ):
        with Wire(url) as wire:
            wire.send(sent)
            [answer] = wire.read(1)
        assert (answer.name, answer.status) == ("a", 413)


def test_trailers_and_upgrades(url: str) -> None:
    trailer = b"0\r\nAuthorization: Bearer right\r\n\r\n"
    upgrade = {"Connection": "Upgrade", "Upgrade": "h2c"}
    with Wire(url) as wire:
        for path in ("/tokenize", "/v1/completions"):
            body = json.dumps({"prompt": "a"}).encode()
            wire.send(request("a", "POST", path, key=None, chunks=chunked(body, end=trailer)))
            wire.send(request("b", "POST", path, {"prompt": "b"}, headers=upgrade) + asked("c"))
            told = [(answer.name, answer.status) for answer in wire.read(3)]
            assert told == [("a", 401), ("b", 200), ("c", 200)]
