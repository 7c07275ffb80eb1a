"""Bodies that are held: their bytes are asked for before they are taken, by tenant and in all."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message
from support.api.api_live import Live
from support.api.key_files import entry, write
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.api.errors import HTTPError
from rootgraft.api.http import limited_body
from rootgraft.api.http.limited_body import LimitedBody, body_room
from rootgraft.tenancy.tenant_shares import TenantShares

CHAT = "/v1/chat/completions"


def body(room: TenantShares, tenant: str, size: int) -> LimitedBody:
    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(size), "more_body": False}

    return LimitedBody(receive, room, tenant, 1 << 20, 30.0)


async def refusal(held: LimitedBody) -> tuple[int, str | None]:
    with pytest.raises(HTTPError) as error:
        await held()
    assert (error.value.headers or {})["retry-after"]
    return error.value.status_code, error.value.code


async def test_a_tenant_holds_as_much_as_it_leaves_and_gives_it_back() -> None:
    room = TenantShares(1000)
    first = body(room, "a", 500)
    await first()
    assert await refusal(body(room, "a", 1)) == (429, "rate_limit_exceeded")
    other = body(room, "b", 250)
    await other()
    assert await refusal(body(room, "c", 251)) == (503, "server_overloaded")
    for each in (first, other):
        each.give_back()
        each.give_back()
    assert room.total == 0
    await body(room, "a", 500)()


async def test_without_keys_bodies_may_hold_all_and_no_more() -> None:
    room = TenantShares(1000)
    await body(room, "", 1000)()
    assert await refusal(body(room, "", 1)) == (503, "server_overloaded")


def test_there_is_always_room_for_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert body_room(1 << 20).most == limited_body.MOST_BODY_BYTES
    assert body_room(1 << 30).most == 4 << 30


def held_back(live: Live, key: str, size: int) -> socket.socket:
    """A request whose body lacks its last byte."""
    host, port = live.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=HANG_SECONDS)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    sock.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {size + 1}\r\n\r\n".encode() + b" " * size)
    return sock


def test_bodies_of_one_key_leave_room_to_others(
    serve_with: Callable[[ServerConfig], Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32 kB one tenant's bodies take half, also while they have not come to their end."""
    rooms: list[TenantShares] = []

    def noted(longest: int) -> TenantShares:
        rooms.append(TenantShares(4 * longest))
        return rooms[0]

    monkeypatch.setattr("rootgraft.api.http.guard.body_room", noted)
    write(file := tmp_path / "keys.json", entry("a"), entry("b"))
    live = serve_with(ServerConfig(api_key_file=str(file), max_request_bytes=8000))
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

    def ask(key: str) -> httpx.Response:
        with live.http(headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"}) as http:
            return http.post(CHAT, content=json.dumps(asked) + " " * 5000)

    with held_back(live, "a", 7000), held_back(live, "a", 7000):
        wait_until(lambda: bool(rooms) and rooms[0].held("a") == 14_000)
        refused = ask("a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert ask("b").status_code == 200
    wait_until(lambda: rooms[0].total == 0)
    assert ask("a").status_code == 200
