"""``/v1/responses`` over WebSocket, in the protocol of ``responses.connect()`` in OpenAI's SDK.

The client sends ``response.create`` with the fields of ``POST /v1/responses``, and gets the events of its stream.
Requests with the same ``stream_id`` are answered one after another; requests with different ones are answered in
parallel.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from ..access.socket_limits import MAX_ID, SocketLimits
from ..errors import ErrorReply
from ..exact_json import dumps_exact
from ..generate.socket_scope import CONNECTION_HEADER
from .inner_request import InnerAnswer, InnerRequest
from .socket_channel import BadMessage, SocketChannel
from .socket_requests import SocketRequests

PATH = "/v1/responses"
_MOST_UNSTORED = 1024
_LEFT_OUT = ("content-type", "content-length", "x-request-id")


async def serve_responses(scope: Scope, receive: Receive, send: Send, limits: SocketLimits) -> None:
    """Answer the messages of one connection until it ends."""
    await ResponseSocket(scope, SocketChannel(receive, send, limits.send_seconds), limits).run()


class ResponseSocket:
    """One connection of ``responses.connect()``."""

    def __init__(self, scope: Scope, channel: SocketChannel, limits: SocketLimits) -> None:
        self._channel = channel
        self._inner = InnerRequest(scope, {CONNECTION_HEADER: uuid.uuid4().hex})
        self._requests = SocketRequests(channel, limits.requests)
        self._lanes: dict[str | None, asyncio.Task[None]] = {}  # The last request of each lane.
        # Ids of the responses that are deleted with the connection, the oldest first.
        self._unstored: dict[str, None] = {}

    async def run(self) -> None:
        """Answer messages until the connection ends."""
        await self._channel.accept()
        try:
            await self._requests.run(self._take, self._refuse)
        finally:
            for response_id in self._unstored:
                await self._inner.delete(f"{PATH}/{response_id}")

    def _take(self, message: dict[str, Any]) -> None:
        kind = message.pop("type", None)
        if kind == "response.steer":
            self._requests.check_room()
            self._requests.begin(self._refuse_steer(message))
            return
        if kind != "response.create":
            raise BadMessage("'type' must be 'response.create'.", param="type")
        lane = message.pop("stream_id", None)
        if lane is not None and not (isinstance(lane, str) and 0 < len(lane) <= MAX_ID):
            raise BadMessage(f"'stream_id' must be a string of 1 to {MAX_ID} characters.", param="stream_id")
        try:
            self._begin(lane, _body_of(message))
        except BadMessage as error:
            error.request_id = lane or ""
            raise

    def _begin(self, lane: str | None, body: dict[str, Any]) -> None:
        self._requests.check_room()
        task = self._requests.begin(self._answer(lane, body, self._lanes.get(lane)))
        self._lanes[lane] = task
        task.add_done_callback(lambda done: self._leave(lane, done))

    def _leave(self, lane: str | None, task: asyncio.Task[None]) -> None:
        if self._lanes.get(lane) is task:
            del self._lanes[lane]

    async def _answer(self, lane: str | None, body: dict[str, Any], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])

        async def emit(name: str, data: bytes) -> None:
            if name == "response.created" and not body.get("store", True):
                self._unstored[orjson.loads(data)["response"]["id"]] = None
            await self._channel.send(_event(name, data, lane))

        answer = await self._inner.post(PATH, body, emit)
        if answer.status != 200:
            await self._channel.send(_refusal(answer, lane))
        while len(self._unstored) > _MOST_UNSTORED:
            oldest = next(iter(self._unstored))
            del self._unstored[oldest]
            await self._inner.delete(f"{PATH}/{oldest}")

    async def _refuse(self, error: BadMessage) -> None:
        await self._channel.send(_error(error.reply, error.request_id or None))

    async def _refuse_steer(self, steer: dict[str, Any]) -> None:
        text = "A running response takes no further input: send it as a new response once this one has ended."
        error = {"type": "invalid_request_error", "code": "steering_not_supported", "message": text}
        given = {name: steer.get(name) for name in ("input", "previous_response_id")}
        event = {"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": given}
        await self._channel.send(dumps_exact(event))


def _body_of(message: dict[str, Any]) -> dict[str, Any]:
    """Return the request body in a message. Raises BadMessage for fields that only HTTP requests may have."""
    if message.get("stream") not in (None, True):
        raise BadMessage("'stream' must be true: a WebSocket streams every response.", param="stream")
    if message.pop("background", None):
        text = "'background' is not supported over WebSocket: use POST /v1/responses."
        raise BadMessage(text, param="background", code="unsupported_parameter")
    return {**message, "stream": True}


def _event(name: str, data: bytes, lane: str | None) -> bytes:
    """Convert an event to a message with its lane. An error is converted to the form that the SDK expects."""
    if name == "error":
        found = orjson.loads(data)
        failure = ErrorReply(500, found["message"], found["param"], found["code"])
        return _error(failure, lane, sequence_number=found["sequence_number"])
    return data if lane is None else data[:-1] + b',"stream_id":' + orjson.dumps(lane) + b"}"


def _error(reply: ErrorReply, lane: str | None, **more: Any) -> bytes:
    error = {"type": reply.type, "code": reply.code, "message": reply.message, "param": reply.param}
    fields = {"type": "error", "status": reply.status, "error": error, **more}
    return orjson.dumps(fields if lane is None else {**fields, "stream_id": lane})


def _refusal(answer: InnerAnswer, lane: str | None) -> bytes:
    """Return the error of a request that was refused before its first event."""
    error = orjson.loads(answer.body)["error"]
    headers = {name: value for name, value in answer.headers.items() if name not in _LEFT_OUT}
    fields = {"type": "error", "status": answer.status, "error": {**error, "headers": headers}}
    return orjson.dumps(fields if lane is None else {**fields, "stream_id": lane})
