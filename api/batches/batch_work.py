"""Answers the requests of a batch file, some at a time, whoever is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import orjson

from .batch_files import BatchOutput, BatchRequest, BatchResponse

Post = Callable[[str, Mapping[str, Any]], Awaitable[tuple[int, Mapping[str, str], bytes]]]
"""Takes the path and the body of a request; gives status, headers in lower case or of any case, and body."""

_BUSY = (429, 503)
_LONGEST_PAUSE = 60.0  # seconds


async def answer_all(
    post: Post,
    requests: Iterator[BatchRequest],
    output: BatchOutput,
    *,
    concurrency: int,
    fields: Mapping[str, Any],
    done: Callable[[], object],
) -> None:
    """Answer each of the requests once, and append its answer to the output.

    Args:
        post: sends a request.
        requests: those that the output lacks.
        output: the account of what is done.
        concurrency: most requests under way at one time.
        fields: of bodies that do not have them.
        done: called after each answer.

    Raises:
        Exception: what ``post`` or the output raises first; the requests under way are given up.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(_work(post, requests, output, fields, done))
    except* Exception as several:
        raise _first(several) from None


async def _work(
    post: Post,
    requests: Iterator[BatchRequest],
    output: BatchOutput,
    fields: Mapping[str, Any],
    done: Callable[[], object],
) -> None:
    """Answer one request after the other, as long as there are any."""
    for request in requests:
        output.add(request, await _answer(post, request, fields))
        done()


async def _answer(post: Post, request: BatchRequest, fields: Mapping[str, Any]) -> BatchResponse:
    """The answer in the batch band; as long as there is no room, it is asked for again when the server says."""
    body = {"priority": "batch", **fields, **request.body}
    while True:
        status, headers, raw = await post(request.url, body)
        if status not in _BUSY:
            return BatchResponse(status, headers.get("x-request-id", ""), _json(raw))
        said = headers.get("retry-after", "")
        await asyncio.sleep(min(float(said) if said.isdecimal() else 1.0, _LONGEST_PAUSE))


def _json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


def _first(several: BaseExceptionGroup[Exception]) -> Exception:
    first = several.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
