"""Batch work: answers the requests of a batch file with limited concurrency, by any server; retries 429 and 503."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from ..exact_json import loads_exact
from .batch_files import BatchRequest, BatchResponse

Post = Callable[[BatchRequest], Awaitable[tuple[int, Mapping[str, str], bytes]]]
"""Sends a request. Returns (status, headers, body). The names of headers are in lower case."""
Next = Callable[[], Awaitable[BatchRequest | None]]
"""Returns the next request without an answer; None after the last one."""
Keep = Callable[[BatchRequest, BatchResponse], Awaitable[None]]
"""Writes an answer to the output."""

_RETRIED = (429, 503)
_LONGEST_PAUSE = 60.0  # Longest pause in seconds before a retry.


async def answer_all(
    post: Post,
    next_request: Next,
    keep: Keep,
    *,
    concurrency: int,
    fields: Mapping[str, Any],
) -> None:
    """Answer each request once, and write the answers. A worker begins its next request after its answer was written.

    Args:
        next_request: returns each request without an answer. There is only one call at a time.
        concurrency: largest number of requests in flight.
        fields: default values for fields of the bodies.

    Raises:
        Exception: the first error of ``post``, ``next_request`` or ``keep``. Requests in flight are then cancelled.
    """
    turn = asyncio.Lock()

    async def work() -> None:
        while True:
            async with turn:
                request = await next_request()
            if request is None:
                return
            await keep(request, await _answer(post, request, fields))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except* Exception as errors:
        raise _first(errors) from None


async def _answer(post: Post, request: BatchRequest, fields: Mapping[str, Any]) -> BatchResponse:
    """Send one request in the priority class ``batch``. After 429 or 503, retry it after the server's Retry-After."""
    sent = replace(request, body={"priority": "batch", **fields, **request.body})
    while True:
        status, headers, raw = await post(sent)
        if status not in _RETRIED:
            return BatchResponse(status, headers.get("x-request-id", ""), _json(raw))
        pause = headers.get("retry-after", "")
        await asyncio.sleep(min(float(pause) if pause.isdecimal() else 1.0, _LONGEST_PAUSE))


def _json(raw: bytes) -> Any:
    try:
        return loads_exact(raw)
    except ValueError:
        return raw.decode(errors="replace")


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
