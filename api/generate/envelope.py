"""Envelope: the fields that every chunk and body of a response begin with, and the events of a stream of chunks."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from fastapi import Response

from ...engine.serving.output_processor import SequenceOutput, TextDelta
from ...engine.serving.request_threads import on_request_thread
from ..exact_json import dumps_exact
from ..large_bodies import LARGE_BODY
from ..observe.token_usage import UsageCount
from .logprob_formats import PIECE
from .streams import Deltas

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields common to the chunks of one request.

    Attributes:
        id: ``chatcmpl-`` or ``cmpl-`` and 32 hexadecimal digits.
        object: OpenAI's name for the kind of object.
        model: the model's name in the request.
    """

    id: str
    object: str
    created: int
    model: str
    fingerprint: str

    @staticmethod
    def new(prefix: str, kind: str, model: str, fingerprint: str) -> Envelope:
        """Return an envelope with a new id and the current time."""
        return Envelope(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model, fingerprint)

    def fields(self) -> dict[str, Any]:
        """Return the fields under OpenAI's names."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def event(self, **fields: Any) -> bytes:
        """Serialize a complete event with the envelope's fields and then ``fields``."""
        return b"data: " + orjson.dumps({**self.fields(), **fields}) + b"\n\n"

    def event_start(self) -> bytes:
        """Serialize the beginning of an event, up to the first choice's index, for chunks joined from bytes."""
        return b"data: " + orjson.dumps(self.fields())[:-1] + b',"choices":[{"index":'


class Chunks(Protocol):
    """Interface of a serializer of one stream's deltas."""

    envelope: Envelope
    include_usage: bool

    def events(self, delta: TextDelta) -> bytes: ...


async def chunk_events(deltas: Deltas, chunks: Chunks, usage: UsageCount) -> AsyncGenerator[bytes, None]:
    """Yield one item for the deltas that arrived together; at the end the usage, if requested, and ``[DONE]``.

    A client that has read nothing for long receives all deltas since then together. If they have many logprobs, they
    become several items, between which other requests are served.
    """
    async with aclosing(deltas) as stream:
        async for arrived in stream:
            found: list[bytes] = []
            num_positions = 0
            for delta in arrived:
                if num_positions > PIECE:
                    if events := b"".join(found):
                        yield events
                    await asyncio.sleep(0)
                    found, num_positions = [], 0
                found.append(chunks.events(delta))
                num_positions += len(delta.logprobs) + len(delta.prompt_logprobs)
            if events := b"".join(found):
                yield events
    end = chunks.envelope.event(choices=[], usage=usage.body()) if chunks.include_usage else b""
    yield end + _DONE


def json_response(body: Any) -> Response:
    return Response(dumps_exact(body), media_type="application/json")


async def long_response(build: Callable[[], Any], outputs: Iterable[SequenceOutput]) -> Response:
    """Build and serialize the body of whole answers. Long ones are built on another thread.

    A client may request 20 logprobs for each token of prompt and answer, and 16 answers: millions of objects, which
    take seconds.

    Raises:
        CapacityError: see ``on_request_thread``.
    """
    if is_long(outputs):
        return await on_request_thread(lambda: json_response(build()))
    return json_response(build())


def is_long(outputs: Iterable[SequenceOutput]) -> bool:
    """Return whether the body of these answers takes more than a few milliseconds to build."""
    outputs = tuple(outputs)
    num_positions = sum(len(each.logprobs) + len(each.prompt_logprobs) for each in outputs)
    return num_positions > PIECE or sum(len(text) for each in outputs for text in each.texts) > LARGE_BODY
