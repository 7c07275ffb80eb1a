"""A web server with ETags and ranges on a thread of its own, which breaks off, redirects and lies as it is told to."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from support.machine.waits import HANG_SECONDS

PIECE = 16_384


@dataclass
class FileServer:
    """Serves bytes by path until ``close``.

    Attributes:
        files: content by path, such as ``/a/adapter_config.json``.
        redirects: path -> URL.
        statuses: path -> status of the answer to it.
        breaks: path -> bytes after which each of the next answers to it breaks off.
        claims: path -> size that the headers tell.
        headers: further headers of all answers.
        no_ranges: answer with the whole file whatever part is asked for.
        asked: method, path, range and authorization of all requests.
        holds: path -> event that the answer waits for in its middle.
    """

    context: ssl.SSLContext | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    breaks: dict[str, list[int]] = field(default_factory=dict)
    claims: dict[str, int] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    no_ranges: bool = False
    asked: list[tuple[str, str, str, str]] = field(default_factory=list)
    holds: dict[str, threading.Event] = field(default_factory=dict)
    extra: Callable[[web.Request], Awaitable[web.StreamResponse | None]] | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._transports: set[asyncio.WriteTransport] = set()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.port: int = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(HANG_SECONDS)

    @property
    def origin(self) -> str:
        return f"{'https' if self.context else 'http'}://localhost:{self.port}"

    def close(self) -> None:
        for event in self.holds.values():
            event.set()
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(HANG_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def gets(self, path: str) -> list[str]:
        """Ranges of the GET requests for a path."""
        return [part for method, each, part, _ in self.asked if method == "GET" and each == path]

    async def _start(self) -> int:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self.context)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def _stop(self) -> None:
        await self._runner.cleanup()
        for transport in self._transports:
            transport.abort()
        for _ in range(10):  # until they have seen their ends
            await asyncio.sleep(0)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if isinstance(request.transport, asyncio.WriteTransport):
            self._transports.add(request.transport)
        self.asked.append(
            (request.method, path, request.headers.get("Range", ""), request.headers.get("Authorization", ""))
        )
        if path in self.statuses:
            return web.Response(status=self.statuses[path], headers=self.headers)
        if self.extra is not None and (answer := await self.extra(request)) is not None:
            return answer
        if path in self.redirects:
            return web.Response(status=302, headers={"Location": self.redirects[path]})
        if path not in self.files:
            return web.Response(status=404)
        return await self.send(request, self.files[path], path)

    async def send(self, request: web.Request, content: bytes, path: str, **headers: str) -> web.StreamResponse:
        """Answer with a content or the part of it that is asked for."""
        tag = f'"{hashlib.md5(content).hexdigest()}"'
        start = 0
        asked = request.headers.get("Range", "")
        is_part = asked and request.headers.get("If-Range", tag) == tag and not self.no_ranges
        if is_part:
            start = int(asked.removeprefix("bytes=").split("-")[0])
        response = web.StreamResponse(status=206 if is_part else 200, headers={"ETag": tag, **headers, **self.headers})
        if is_part:
            response.headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        response.content_length = self.claims.get(path, len(content)) - start
        if self.claims.get(path, 0) > len(content):
            response.force_close()  # so that a client which waits for the rest sees the end
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        end = len(content)
        breaks_off = bool(self.breaks.get(path))
        if breaks_off:
            end = min(end, start + self.breaks[path].pop(0))
        for at in range(start, end, PIECE):
            if path in self.holds and at > start:
                await asyncio.to_thread(self.holds[path].wait)
            try:
                await response.write(content[at : min(at + PIECE, end)])
            except ConnectionResetError:  # the client has left
                return response
        if breaks_off and request.transport is not None:
            await asyncio.sleep(0.01)
            request.transport.abort() if self.context is None else request.transport.close()
        return response
