"""Calls of an application within the process: pieces, errors, ends of either side."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from starlette.types import Receive, Scope, Send

from rootgraft.api.rpc.app_calls import AppCalls, CallError

START = {"type": "http.response.start", "status": 200, "headers": []}


def piece(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


def test_one_piece_waits_for_a_reader() -> None:
    async def job() -> None:
        made: list[int] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(START)
            for number in range(100):
                made.append(number)
                await send(piece(b"data: {}\n\n"))

        events = AppCalls(app).events(None, "/x", {})
        for taken in range(1, 6):
            assert await anext(events) == {}
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(made) <= taken + 2
        await events.aclose()
        assert len(made) < 10

    asyncio.run(job())


def test_leaving_early_cancels_the_application() -> None:
    async def job() -> None:
        ended = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await send(START)
                await send(piece(b"x"))
                await send(piece(b"y"))
                await send(piece(b"z"))
            finally:
                ended.set()

        async with AppCalls(app).open(None, "GET", "/x") as answer:
            assert answer.status == 200
        assert ended.is_set()

    asyncio.run(job())


@pytest.mark.parametrize("begun", [False, True])
def test_an_application_that_breaks_off(begun: bool) -> None:
    async def job() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if begun:
                await send(START)
                await send(piece(b'{"a": 1}'))
            raise ValueError("secret")

        with pytest.raises(CallError, match="the server's log") as caught:
            await AppCalls(app).json(None, "GET", "/x")
        assert caught.value.status is grpc.StatusCode.INTERNAL

    asyncio.run(job())


def test_an_answer_without_its_end_is_none() -> None:
    """The application gives up, without an error, on who has read nothing for a minute."""

    async def job() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(START)
            await send(piece(b"data: {}\n\n"))

        events = AppCalls(app).events(None, "/x", {})
        assert await anext(events) == {}
        with pytest.raises(CallError, match="was aborted") as caught:
            await anext(events)
        assert caught.value.status is grpc.StatusCode.ABORTED

    asyncio.run(job())
