"""What every answer and every chunk of one request starts with."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Response


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that stay the same.

    Attributes:
        id: ``chatcmpl-`` or ``cmpl-`` and 32 hexadecimal digits.
        object: OpenAI's name of the kind of answer; that of its chunks may differ.
        model: the name that the request asked for.
    """

    id: str
    object: str
    created: int
    model: str
    fingerprint: str

    @staticmethod
    def new(prefix: str, kind: str, model: str, fingerprint: str) -> Envelope:
        """A head with a new id, made now."""
        return Envelope(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model, fingerprint)

    def fields(self) -> dict[str, Any]:
        """The fields as OpenAI names them."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def event(self, **fields: Any) -> bytes:
        """A whole event with these fields after the head's."""
        return b"data: " + orjson.dumps({**self.fields(), **fields}) + b"\n\n"

    def event_start(self) -> bytes:
        """The start of an event up to the first choice's index, to be completed by hand: the fast path."""
        return b"data: " + orjson.dumps(self.fields())[:-1] + b',"choices":[{"index":'


def json_response(body: Any) -> Response:
    """A body as JSON."""
    return Response(orjson.dumps(body), media_type="application/json")
