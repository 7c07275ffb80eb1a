"""A small OpenAI-compatible server that does what a test tells it."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from support.machine.waits import HANG_SECONDS


@dataclass
class FakeServer:
    """Answers every request with ``pieces``; tests set what goes wrong and read what was asked.

    Attributes:
        refuse: each request takes the first entry: None answers, a status refuses with it. Empty: all are answered.
        thoughts: pieces of a thought before a chat's answer.
        endless: send pieces until the client goes away, then set ``left``.
        cut: end the stream before its last events.
        counts: whether the server reports usage.
        stall_after: hold all requests after so many, until the client goes away.
        most_messages: refuse a chat with more messages as too long for the context.
        together: hold the first answers until so many requests run at once, and a moment longer for one too many.
    """

    url: str = ""
    pieces: tuple[str, ...] = ("Hel", "lo ", "wörld")
    thoughts: tuple[str, ...] = ()
    refuse: list[int | None] = field(default_factory=list)
    endless: bool = False
    cut: bool = False
    counts: bool = True
    together: int = 1
    stall_after: int | None = None
    most_messages: int | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    most_running: int = 0
    left: threading.Event = field(default_factory=threading.Event)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "first"}, {"id": "second"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        if self.stall_after is not None and len(self.asked) > self.stall_after:
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.005)
            return web.Response()
        self.running.add(id(request))
        self.most_running = max(self.most_running, len(self.running))
        try:
            if self.refuse and (status := self.refuse.pop(0)):
                error = {"message": "no room\nnow", "type": "server_error", "param": None, "code": None}
                return web.json_response({"error": error}, status=status)
            if self.most_messages is not None and len(body.get("messages", ())) > self.most_messages:
                error = {"message": "too long", "code": "context_length_exceeded"}
                return web.json_response({"error": error}, status=400)
            await self.gather()
            return await self.stream(request, body)
        finally:
            self.leave(request)

    async def gather(self) -> None:
        """Wait for ``together`` requests: a client that never sends so many fails its test."""
        if self.most_running >= self.together:
            return
        async with asyncio.timeout(HANG_SECONDS):
            while self.most_running < self.together:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)

    async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = 0
        try:
            for thought in self.thoughts if "messages" in body else ():
                delta = {"reasoning_content": thought, "reasoning": thought}
                await self.event(response, {"choices": [{"index": 0, "finish_reason": None, "delta": delta}]})
            while self.endless or count < len(self.pieces):
                piece = self.pieces[count % len(self.pieces)]
                count += 1
                delta = {"delta": {"content": piece}} if "messages" in body else {"text": piece}
                await self.event(response, {"choices": [{"index": 0, "finish_reason": None, **delta}]})
                await asyncio.sleep(0)
        except ConnectionError:
            self.left.set()
            return response
        if self.cut:
            return response
        is_cut = count >= body.get("max_tokens", count + 1)
        finish = "length" if is_cut else "stop"
        await self.event(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        if self.counts:
            await self.event(response, {"choices": [], "usage": self.usage(body, count)})
        self.leave(request)
        await response.write(b"data: [DONE]\n\n")
        return response

    def leave(self, request: web.Request) -> None:
        """Count a request as over, once: before its last bytes, after which the client may send the next at once."""
        self.running.discard(id(request))

    def usage(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        """Three tokens for a request, two for each word: what a calibration has to find out."""
        text = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
        details = {"cached_tokens": 2}
        return {
            "prompt_tokens": 3 + 2 * len(text.split()),
            "completion_tokens": count,
            "prompt_tokens_details": details,
        }

    async def event(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b": a comment\n\ndata: " + json.dumps(event).encode() + b"\n\n")
