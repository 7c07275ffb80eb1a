"""``/v1/stream`` over WebSocket: many requests on one connection, distinguished by ids that the client chooses.

The client sends ``generate`` with the fields of a chat (``messages``) or a completion (``prompt``), and ``cancel``. The
server sends ``token`` for each piece of an answer, and exactly one ``done`` or ``error`` at the end of each request.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from ..access.socket_limits import MAX_ID, SocketLimits
from .inner_request import InnerAnswer, InnerRequest
from .past_conversations import PastConversations
from .socket_channel import BadMessage, SocketChannel
from .socket_requests import SocketRequests
from .stream_answer import StreamAnswer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_LEFT_OUT = ("content-type", "content-length", "x-request-id")


async def serve_stream(scope: Scope, receive: Receive, send: Send, limits: SocketLimits) -> None:
    """Answer the messages of one connection until it ends."""
    await StreamSocket(scope, SocketChannel(receive, send, limits.send_seconds), limits).run()


class StreamSocket:
    """One connection of ``/v1/stream``."""

    def __init__(self, scope: Scope, channel: SocketChannel, limits: SocketLimits) -> None:
        self._channel = channel
        self._inner = InnerRequest(scope, {})
        self._requests = SocketRequests(channel, limits.requests)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._past = PastConversations(limits.conversation_bytes)

    async def run(self) -> None:
        """Answer messages until the connection ends."""
        await self._channel.accept()
        await self._requests.run(self._take, self._refuse)

    def _take(self, message: dict[str, Any]) -> None:
        kind, request_id = message.pop("type", None), message.pop("id", None)
        if kind not in ("generate", "cancel"):
            raise BadMessage("'type' must be 'generate' or 'cancel'.", param="type", request_id=_shown(request_id))
        if not (isinstance(request_id, str) and 0 < len(request_id) <= MAX_ID):
            text = f"'id' must be a string of 1 to {MAX_ID} characters."
            raise BadMessage(text, param="id", request_id=_shown(request_id))
        try:
            if kind == "cancel":
                self._cancel(request_id, message)
            else:
                self._begin(request_id, message)
        except BadMessage as error:
            error.request_id = request_id
            raise

    def _cancel(self, request_id: str, more: dict[str, Any]) -> None:
        if more:
            raise BadMessage(f"'{next(iter(more))[:64]}' is not a field of 'cancel'.", code="unknown_parameter")
        if request_id not in self._running:
            raise BadMessage("'id' is not the id of a running request.", param="id", code="request_not_found")
        task = self._running[request_id]
        if not task.cancelling():
            # The task is not cancelled at once, because a task that has not started yet would end without any event.
            asyncio.get_running_loop().call_soon(task.cancel)

    def _begin(self, request_id: str, message: dict[str, Any]) -> None:
        if request_id in self._running:
            raise BadMessage("'id' is the id of a running request: use another one.", param="id")
        self._requests.check_room()
        after = message.pop("after", None)
        path, body = _body_of(message)
        before = None
        if after is not None:
            self._check_after(after, path)
            before = self._running.get(after)
        task = self._requests.begin(self._answer(request_id, path, body, after, before))
        self._running[request_id] = task
        task.add_done_callback(lambda done: self._leave(request_id, done))

    def _leave(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._running.get(request_id) is task:
            del self._running[request_id]

    def _check_after(self, after: Any, path: str) -> None:
        if path != CHAT:
            raise BadMessage("'after' continues a chat: give 'messages'.", param="after")
        if not isinstance(after, str) or (after not in self._running and after not in self._past):
            raise _unknown_after()

    async def _answer(
        self, request_id: str, path: str, body: dict[str, Any], after: str | None, before: asyncio.Task[None] | None
    ) -> None:
        answer = StreamAnswer(request_id)
        try:
            if before is not None:
                await asyncio.wait([before])
            if after is not None:
                body = self._past.with_turn(after, body)

            async def emit(_name: str, data: bytes) -> None:
                for event in answer.take(data):
                    await self._channel.send(event)

            refused = await self._inner.post(path, body, emit)
            if refused.status != 200:
                await self._channel.send(_refusal(request_id, refused))
                return
        except BadMessage as error:
            error.request_id = request_id
            await self._refuse(error)
            return
        except asyncio.CancelledError:
            if self._channel.gone.is_set():
                raise
            answer.cancel()
        if answer.is_kept and path == CHAT:
            self._past.keep(request_id, body, answer.message())
        self._leave_now(request_id)
        await self._channel.send(answer.last_event())

    def _leave_now(self, request_id: str) -> None:
        """Release the id before the last event is sent, because the client may then reuse the id."""
        self._running.pop(request_id, None)

    async def _refuse(self, error: BadMessage) -> None:
        told = orjson.loads(error.reply.body())["error"]
        await self._channel.send(_error(error.request_id, error.reply.status, told))


def _body_of(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and body of a message's request. Raises BadMessage for fields that only HTTP has."""
    if ("messages" in message) == ("prompt" in message):
        raise BadMessage("'generate' needs either 'messages' or 'prompt'.", param="messages")
    if message.get("stream") not in (None, True):
        raise BadMessage("'stream' must be true: every request is streamed.", param="stream")
    if "stream_options" in message:
        text = "'stream_options' is not supported: 'done' always includes the usage."
        raise BadMessage(text, param="stream_options", code="unsupported_parameter")
    added = {"return_token_ids": True, **message, "stream": True, "stream_options": {"include_usage": True}}
    return CHAT if "messages" in message else COMPLETION, added


def _unknown_after() -> BadMessage:
    text = "'after' is not a chat of this connection, or the chat is no longer stored: send all messages."
    return BadMessage(text, param="after", code="conversation_not_found")


def _shown(request_id: Any) -> str:
    return request_id[:MAX_ID] if isinstance(request_id, str) else ""


def _refusal(request_id: str, answer: InnerAnswer) -> bytes:
    headers = {name: value for name, value in answer.headers.items() if name not in _LEFT_OUT}
    return _error(request_id, answer.status, {**orjson.loads(answer.body)["error"], "headers": headers})


def _error(request_id: str, status: int, error: dict[str, Any]) -> bytes:
    return orjson.dumps({"type": "error", "id": request_id or None, "status": status, "error": error})
