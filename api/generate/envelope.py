"""Envelope of a response: the fields with which the body and every chunk of one request begin."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Response


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields common to the chunks of one request.

    Attributes:
        id: ``chatcmpl-`` or ``cmpl-`` and 32 hexadecimal digits.
        object: OpenAI's name of the kind of object.
        model: the name in the request.
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
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def event(self, **fields: Any) -> bytes:
        """Serialize a whole event with ``fields`` after the envelope's."""
        return b"data: " + orjson.dumps({**self.fields(), **fields}) + b"\n\n"

    def event_start(self) -> bytes:
        """Serialize an event's start up to the first choice's index, for chunks joined from bytes."""
        return b"data: " + orjson.dumps(self.fields())[:-1] + b',"choices":[{"index":'


def json_response(body: Any) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
