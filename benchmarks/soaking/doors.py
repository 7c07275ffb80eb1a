"""Requests of the soak over other doors than HTTP: the WebSocket of ``/v1/stream``, and gRPC."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc

from rootgraft.api.rpc.messages import message

_METHOD = "/rootgraft.v1.Generation/Generate"
_TYPED = {"model", "messages"}
"""Fields that a ``GenerateRequest`` names; all others go as ``extra_json``."""
_CANCELLED = "cancelled"


@dataclass
class Streamed:
    """The part of one choice that has arrived.

    Attributes:
        reason: the finish reason; "cancelled" of what the client has ended.
    """

    text: str = ""
    reason: str = ""


async def over_socket(
    http: aiohttp.ClientSession, url: str, bodies: Mapping[str, Mapping[str, Any]], cancelled: str
) -> dict[str, Streamed]:
    """Ask several chats at once over one connection, and cancel one of them when its first text has come.

    Args:
        bodies: chats of one choice each, by the names that the connection gives them.
        cancelled: the name of the one to cancel.

    Raises:
        ValueError: the server answered with an error, or closed the connection.
    """
    came = {name: Streamed() for name in bodies}
    async with http.ws_connect(f"{url}/stream") as socket:
        for name, body in bodies.items():
            await socket.send_json({"type": "generate", "id": name, **body})
        while any(not each.reason for each in came.values()):
            frame = await socket.receive()
            if frame.type is not aiohttp.WSMsgType.TEXT:
                raise ValueError(f"the connection ended: {frame}")
            event = json.loads(frame.data)
            if event["type"] == "error":
                raise ValueError(f"over a WebSocket: {event}")
            if event["type"] == "done":
                came[event["id"]].reason = event["finish_reason"] or event["choices"][0]["finish_reason"]
                continue
            if event["id"] == cancelled and not came[cancelled].text:
                await socket.send_json({"type": "cancel", "id": cancelled})
            came[event["id"]].text += event["text"]
    return came


async def over_grpc(
    channel: grpc.aio.Channel, body: Mapping[str, Any], rng: random.Random, *, leaves: bool
) -> Streamed:
    """Ask a chat of one choice over gRPC.

    Args:
        leaves: cancel the call after a few pieces of the answer.

    Raises:
        ValueError: the call failed.
    """
    request = message("rootgraft.v1.GenerateRequest")(
        model=body["model"],
        chat={"messages": body["messages"]},
        extra_json=json.dumps({name: value for name, value in body.items() if name not in _TYPED}),
    )
    generate = channel.unary_stream(
        _METHOD,
        request_serializer=lambda each: each.SerializeToString(),
        response_deserializer=message("rootgraft.v1.GenerateChunk").FromString,
    )
    came, pieces = Streamed(), rng.randint(1, 6) if leaves else 0
    call = generate(request, timeout=900)
    try:
        async for chunk in call:
            came.text += chunk.text
            came.reason = chunk.finish_reason or came.reason
            pieces -= 1
            if pieces == 0:
                call.cancel()
                return Streamed(came.text, _CANCELLED)
    except grpc.aio.AioRpcError as error:
        raise ValueError(f"over gRPC: {error.code()}: {error.details()}") from error
    return came


def is_expected(came: Streamed, wanted: Mapping[str, Any]) -> bool:
    """Return whether an answer is the one that must come, or its beginning if the client has ended it."""
    if came.reason == _CANCELLED:
        return bool(wanted["text"].startswith(came.text))
    return (came.text, came.reason) == (wanted["text"], wanted["reason"])
