"""Names in Host and Origin: no name that a web page's owner can have is served without keys."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.api_live import Live
from support.machine.waits import HANG_SECONDS

from rootgraft.api.access.api_keys import KeyRing
from rootgraft.api.http.allowed_hosts import AllowedHosts, name_of

LOOPBACK = ["localhost", "LOCALHOST:8000", "a.localhost", "127.0.0.1", "127.8.9.1:1", "[::1]:8000", "localhost."]
LOCAL = ["rootgraft", "box:8000", "gpu.local", "x.internal", "api.svc.cluster.local", "10.0.0.7:8000", "[fd00::1]"]
FOREIGN = [
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example:8000",
    "1.evil.test",
    "",
    "a b",
    "x@localhost",
]


def status(
    host: str | None,
    origin: str | None = None,
    server: Any = ("127.0.0.1", 8000),
    path: str = "/v1/models",
    keys: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
    origins: tuple[str, ...] = (),
) -> int:
    """What a request is answered with: 200 by the application."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("no body is read")

    headers = [(name, value.encode()) for name, value in ((b"host", host), (b"origin", origin)) if value is not None]
    scope = {"type": "http", "path": path, "headers": headers, "server": server}
    middleware = AllowedHosts(app, keys=KeyRing(keys, None), names=names, origins=origins)
    asyncio.run(middleware(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize("host", LOOPBACK)
def test_names_of_loopback_are_served_everywhere(host: str) -> None:
    assert status(host) == status(host, server=("::1", 8000)) == status(host, server=("10.0.0.7", 80)) == 200
    assert status("localhost", f"http://{host}") == 200


@pytest.mark.parametrize("host", LOCAL)
def test_names_of_local_networks_are_served_on_the_network_alone(host: str) -> None:
    assert (status(host), status(host, server=("10.0.0.7", 8000))) == (403, 200)


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign_names_are_served_with_keys_or_by_name(host: str) -> None:
    for server in (("127.0.0.1", 8000), ("10.0.0.7", 8000), ("::1", 8000, 0, 0)):
        assert status(host, server=server) == status("localhost", f"http://{host}", server=server) == 403
        assert status(host, server=server, path="/ui") == 403
    assert status(host, keys=("k",)) == status(host, names=("*",)) == 200
    assert status(host, path="/health") == 200
    assert status(host, server=None) == status(host, server=("/run/x.sock", None)) == 200, "a Unix domain socket"


def test_names_that_are_given_are_served_and_then_keys_lift_nothing() -> None:
    names = ("api.example.org", "*.example.net")
    for host in ("api.example.org", "API.example.org:443", "a.b.example.net"):
        assert status(host, names=names) == status(host, names=names, keys=("k",)) == 200
    for host in ("example.org", "example.net", "xexample.net"):
        assert status(host, names=names) == status(host, names=names, keys=("k",)) == 403


def test_pages_of_allowed_origins_and_programs_may_ask() -> None:
    assert status("localhost", "https://chat.example.org", origins=("https://chat.example.org",)) == 200
    assert status("localhost", "https://chat.example.org", origins=("*",)) == 200
    assert status("localhost", "vscode-webview://abc") == status("localhost", "app://obsidian.md") == 200
    assert status("localhost", "null") == status("localhost", "http://[") == 403
    assert status(None) == 200, "no browser leaves it out"


@given(st.from_regex(r"\A[a-z0-9-]{1,10}(\.[a-z0-9-]{1,10}){0,3}\.(com|example|ai|dev)\Z"), st.booleans())
def test_no_public_name_is_served(name: str, upper: bool) -> None:
    host = (name.upper() if upper else name) + ":8000"
    assert name_of(host) == name
    assert status(host) == status(host, server=("192.168.1.2", 8000)) == 403


def test_the_error_has_the_shape_of_its_protocol(live: Live) -> None:
    for path in ("/v1/models", "/ui", "/v1/messages"):
        reply = httpx.get(live.url + path, headers={"host": "evil.example"}, trust_env=False, timeout=HANG_SECONDS)
        error = reply.json()["error"]
        assert reply.status_code == 403 and "--allowed-hosts" in error["message"] and reply.headers["x-request-id"]
        assert error["type"] == ("permission_error" if path == "/v1/messages" else "invalid_request_error")
