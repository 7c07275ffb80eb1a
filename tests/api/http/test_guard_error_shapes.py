"""Errors of the framework have the shape of all others, and keep their status and headers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import FileResponse, PlainTextResponse, Response
from support.api.api_live import make_state

from rootgraft.api.http.guard import Identify


def get(response: Response, path: str = "/v1/files/x/content", **headers: str) -> httpx.Response:
    """Ask an application that always answers so."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await response(scope, receive, send)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(Identify(app, state=make_state()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize(("given", "status"), [("bytes=-----", 400), ("bytes=99999-", 416), ("lines=1-2", 400)])
def test_a_range_that_cannot_be_served(tmp_path: Any, given: str, status: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"0123456789")
    reply = get(FileResponse(file), range=given)
    assert reply.status_code == status and reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"].endswith(".")
    assert status != 416 or reply.headers["content-range"].endswith("*/10")
    assert get(FileResponse(file), range="bytes=2-3").content == b"23"


def test_plain_errors_of_each_protocol() -> None:
    for status in (400, 404, 405, 500):
        reply = get(PlainTextResponse("Not this", status, {"allow": "GET"}))
        assert (reply.status_code, reply.json()["error"]["message"], reply.headers["allow"]) == (
            status,
            "Not this.",
            "GET",
        )
    assert get(Response(status_code=416), "/v1/messages").json()["type"] == "error"
    assert get(PlainTextResponse("all is well")).text == "all is well"
