"""Provider client: forwards a request to an OpenAI-compatible server elsewhere, and streams the response back.

Only the operator configures addresses, models and keys. Redirects are not followed, no header of the client is sent,
and a stream is read no faster than the client reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from starlette.types import Send

from ..exact_json import dumps_exact
from ..fallback_plan import Provider
from ..generate.streams import ClientGone

PROVIDER_PATHS: Mapping[str, frozenset[str]] = {
    "/v1/chat/completions": frozenset(
        (
            *("messages", "model", "frequency_penalty", "logprobs", "top_logprobs", "max_tokens", "seed", "stop"),
            *("max_completion_tokens", "n", "presence_penalty", "response_format", "stream", "stream_options"),
            *("temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "priority"),
            *("user", "metadata"),
        )
    ),
    "/v1/completions": frozenset(
        (
            *("prompt", "model", "best_of", "echo", "frequency_penalty", "logprobs", "max_tokens", "n", "stop"),
            *("presence_penalty", "seed", "stream", "stream_options", "suffix", "temperature", "top_p", "priority"),
            *("user",),
        )
    ),
}
"""Routes of OpenAI's protocol that a provider may answer, with the fields that have the same meaning there."""

# Fields that are not sent: fields of this server, and fields that identify the client's users.
_NOT_SENT = ("priority", "user", "metadata")
MAX_ANSWER_BYTES = 16 << 20
MOST_CALLS = 256
_CONNECT_SECONDS = 10.0
_SEND_SECONDS = 60.0
_CHUNK = 1 << 16


class ProviderFailed(Exception):
    """Raised if a provider has failed before its response began."""


class ProviderClient:
    """Sends requests to providers, at most ``MOST_CALLS`` at a time to all of them together.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._num_calls = 0

    async def answer(self, provider: Provider, path: str, body: Mapping[str, Any], out: ProviderAnswer) -> None:
        """Forward a request to a provider, and send its response to the client.

        Args:
            path: one of ``PROVIDER_PATHS``.

        Raises:
            ProviderFailed: the provider failed before any part of the response was sent.
        """
        asked = {name: value for name, value in body.items() if name not in _NOT_SENT} | {"model": provider.model}
        if body.get("stream"):
            options = body.get("stream_options")
            options = options if isinstance(options, dict) else {}
            asked["stream_options"] = {**options, "include_usage": True}
            out.hides_usage = not options.get("include_usage")
        try:
            async with self._call(provider, path, asked) as reply:
                if reply.status != 200:
                    raise ProviderFailed
                await (out.stream(reply) if body.get("stream") else out.whole(reply))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if not out.has_begun:
                raise ProviderFailed from error
            await out.break_off(provider.name)

    @asynccontextmanager
    async def _call(
        self, provider: Provider, path: str, body: Mapping[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._num_calls >= MOST_CALLS:
            raise ProviderFailed
        limits = aiohttp.ClientTimeout(
            total=None, connect=_CONNECT_SECONDS, sock_connect=_CONNECT_SECONDS, sock_read=provider.timeout
        )
        headers = {"content-type": "application/json"}
        if provider.key:
            headers["authorization"] = f"Bearer {provider.key}"
        url = provider.base_url + path.removeprefix("/v1")
        self._num_calls += 1
        try:
            async with (
                aiohttp.ClientSession(timeout=limits, cookie_jar=aiohttp.DummyCookieJar()) as session,
                session.post(url, data=dumps_exact(body), headers=headers, allow_redirects=False) as reply,
            ):
                yield reply
        finally:
            self._num_calls -= 1


class ProviderAnswer:
    """The response to the client, made from a provider's response.

    Args:
        headers: further headers of the response.
        count: called once with the usage, before the end of the response is sent, or when the client has left.

    Attributes:
        hides_usage: whether to drop the chunk with the usage, because the client has not requested it.
        has_begun: whether a part of the response was sent to the client.
        usage: ``prompt_tokens``, ``completion_tokens`` and ``cached_tokens``.
    """

    def __init__(
        self, send: Send, headers: Mapping[str, str], count: Callable[[Mapping[str, int]], Awaitable[None]]
    ) -> None:
        self._send = send
        self._headers = headers
        self._count_usage = count
        self._is_counted = False
        self.hides_usage = False
        self.has_begun = False
        self.usage: dict[str, int] = {}

    async def whole(self, reply: aiohttp.ClientResponse) -> None:
        """Send a response that is not a stream once it is complete.

        Raises ValueError if it is not JSON or is too long.
        """
        data = bytearray()
        async for piece in reply.content.iter_chunked(_CHUNK):
            data += piece
            if len(data) > MAX_ANSWER_BYTES:
                raise ValueError("too long")
        self._count(orjson.loads(data))
        await self._write(bytes(data), "application/json", more=False)

    async def stream(self, reply: aiohttp.ClientResponse) -> None:
        """Send the events of a stream as they arrive.

        Raises ValueError if an event is malformed or too long, or if the stream ends too early.
        """
        rest, is_whole = b"", False
        async for piece in reply.content.iter_chunked(_CHUNK):
            *events, rest = (rest + piece.replace(b"\r\n", b"\n")).split(b"\n\n")
            if len(rest) > MAX_ANSWER_BYTES:
                raise ValueError("too long")
            for event in events:
                is_whole = is_whole or event == b"data: [DONE]"
                if self._is_shown(event):
                    await self._write(event + b"\n\n", "text/event-stream", more=True)
        if not is_whole:
            raise ValueError("no end")
        await self._write(b"", "text/event-stream", more=False)

    async def break_off(self, name: str) -> None:
        """End a stream with an error event, because the provider has failed."""
        error = {
            "message": f"The provider {name} ended its answer before it was complete.",
            "type": "server_error",
            "param": None,
            "code": "provider_failed",
        }
        await self._write(b"data: " + orjson.dumps({"error": error}) + b"\n\n", "text/event-stream", more=False)

    async def close(self) -> None:
        """Report the usage of a response that has begun, unless it was reported already."""
        if self.has_begun and not self._is_counted:
            self._is_counted = True
            await self._count_usage(self.usage)

    def _is_shown(self, event: bytes) -> bool:
        """Record the usage in an event. Returns whether the client gets the event."""
        data = event.removeprefix(b"data: ")
        if data == event or data == b"[DONE]":
            return True
        chunk = orjson.loads(data)
        self._count(chunk)
        return not (self.hides_usage and isinstance(chunk, dict) and chunk.get("choices") == [])

    def _count(self, answer: Any) -> None:
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            found = {**usage, "cached_tokens": details.get("cached_tokens") if isinstance(details, dict) else 0}
            for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
                value = found.get(name)
                self.usage[name] = value if type(value) is int and 0 <= value < 1 << 40 else 0

    async def _write(self, piece: bytes, kind: str, *, more: bool) -> None:
        """Send a piece of the body. Raises ClientGone if the client reads nothing for ``_SEND_SECONDS``."""
        try:
            if not self.has_begun:
                self.has_begun = True
                own = [(b"content-type", kind.encode()), (b"cache-control", b"no-cache")]
                added = [(name.encode(), value.encode("latin-1", "replace")) for name, value in self._headers.items()]
                await self._send({"type": "http.response.start", "status": 200, "headers": [*own, *added]})
            if not more:
                await self.close()
            async with asyncio.timeout(_SEND_SECONDS):
                await self._send({"type": "http.response.body", "body": piece, "more_body": more})
        except TimeoutError:
            raise ClientGone from None
