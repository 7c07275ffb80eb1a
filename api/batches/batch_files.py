"""Batch files in OpenAI's format: reads request lines, appends answer lines, and writes output and error files.

A line of the input is ``{"custom_id", "method": "POST", "url", "body"}``. A line of the output is ``{"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error": null}``, also for refused requests.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import orjson

from ...engine.errors import ConfigError, quoted
from ..exact_json import dumps_exact, loads_exact

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/decisions")
MAX_CUSTOM_ID = 512
_FIELDS = {"custom_id", "method", "url", "body"}
# Every line of answers begins with these bytes.
_ANSWER = b'{"id":"batch_req_'


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input: a unique ``custom_id``, a ``url`` from ``ENDPOINTS``, and the body of the request."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchResponse:
    """Response to a request: the HTTP status, the request id in the server's log, and the JSON body."""

    status: int
    request_id: str
    body: Any


class WrongLine(ConfigError):
    """Raised if a line of the input is not a valid request.

    ``line`` is its number from 1, ``code`` is OpenAI's error code.
    """

    def __init__(self, name: str, line: int, reason: str, code: str = "invalid_request") -> None:
        super().__init__(f"{name}, line {line}: {reason}")
        self.line = line
        self.reason = reason
        self.code = code


def read_requests(path: Path, endpoint: str | None = None, max_line: int = -1) -> Iterator[BatchRequest]:
    """Yield the requests of a file. Empty lines and a byte order mark are skipped.

    Args:
        endpoint: the only ``url`` allowed; None for any of ``ENDPOINTS``.
        max_line: largest number of bytes of a line without its end; -1 for no limit.

    Raises:
        WrongLine: a line is not a valid request.
        ConfigError: the file cannot be read.
    """
    urls = ENDPOINTS if endpoint is None else (endpoint,)
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            lines = iter(partial(file.readline, max_line + 2 if max_line >= 0 else -1), b"")
            for number, line in enumerate(lines, 1):
                if max_line >= 0 and len(line.rstrip(b"\r\n")) > max_line:
                    reason = f"is longer than the limit of {max_line} bytes per request."
                    raise WrongLine(path.name, number, reason)
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    try:
                        request = _request(line, urls)
                    except ValueError as error:
                        raise WrongLine(path.name, number, str(error)) from None
                    if request.custom_id in seen:
                        reason = f"custom_id {quoted(request.custom_id)} is used twice."
                        raise WrongLine(path.name, number, reason, "duplicate_custom_id")
                    seen.add(request.custom_id)
                    yield request
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def _request(line: bytes, urls: Sequence[str]) -> BatchRequest:
    """Parse one line. Raises ValueError with the reason."""
    try:
        fields = loads_exact(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError("is not a JSON object.")
    if missing := _FIELDS - fields.keys():
        raise ValueError(f"{min(missing)!r} is missing.")
    custom_id, url, body = fields["custom_id"], fields["url"], fields["body"]
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a string that is not empty.")
    if len(custom_id) > MAX_CUSTOM_ID:
        raise ValueError(f"custom_id must have at most {MAX_CUSTOM_ID} characters.")
    if fields["method"] != "POST" or url not in urls:
        raise ValueError(f"method must be POST and url {'one of ' if len(urls) > 1 else ''}{', '.join(urls)}.")
    if not isinstance(body, dict) or body.get("stream") or body.get("background"):
        # The response to a background request would only say that it is queued.
        raise ValueError("body must be a JSON object that does not ask for a stream or a background response.")
    return BatchRequest(custom_id, url, body)


class BatchOutput:
    """Append-only file of answers. An interrupted batch resumes from it.

    If a crash has cut off the last line, opening the file truncates this line, so that its request is answered again.

    Raises:
        ConfigError: the file cannot be written, or contains lines that are not answers. The file is then not changed.

    Attributes:
        done: ``custom_id`` of each answer in the file.
        failed: number of answers with a status other than 200.
        size: size of the file in bytes.
    """

    def __init__(self, path: Path) -> None:
        self.done: set[str] = set()
        self.failed = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
        try:
            self.size = self._read(path)
            os.ftruncate(self._file, self.size)
        except OSError as error:
            os.close(self._file)
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
        except ConfigError:
            os.close(self._file)
            raise

    def _read(self, path: Path) -> int:
        """Count the answers in the file. Returns the size of its complete lines in bytes."""
        size = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    if not line.endswith(b"\n"):
                        if line.startswith(_ANSWER[: len(line)]):
                            break
                        raise ValueError("another file's last line")
                    fields = orjson.loads(line)
                    self._count(fields["custom_id"], fields["response"]["status_code"])
                except (ValueError, KeyError, TypeError):
                    raise ConfigError(
                        f"{path.name}, line {number}: not an answer; the file is left unchanged."
                    ) from None
                size += len(line)
        return size

    def add(self, request: BatchRequest, response: BatchResponse, line: bytes) -> None:
        """Append an answer's ``line`` to the file. Raises ConfigError if it cannot be written completely."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            # The part of a line that was written is not an answer.
            os.ftruncate(self._file, self.size)
            raise ConfigError(f"the output cannot be written: {error.strerror}.") from error
        self.size += len(line)
        self._count(request.custom_id, response.status)

    def _count(self, custom_id: str, status: int) -> None:
        self.done.add(custom_id)
        self.failed += status != 200

    def close(self) -> None:
        """Close the file. Must be called once."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def answer_line(request: BatchRequest, response: BatchResponse) -> bytes:
    """Serialize an answer as a line."""
    answer = {"status_code": response.status, "request_id": response.request_id, "body": response.body}
    fields = {"id": _new_id(), "custom_id": request.custom_id, "response": answer, "error": None}
    return dumps_exact(fields) + b"\n"


def _new_id() -> str:
    return f"batch_req_{uuid4().hex}"


_ERRORS = {
    "cancelled": ("batch_cancelled", "This batch was cancelled before the request was answered."),
    "expired": ("batch_expired", "This batch expired before the request was answered."),
}


def answer_lines(answers: Path, *, failed: bool) -> Iterator[bytes]:
    """Yield the answer lines with status 200, or with ``failed`` all other lines."""
    with answers.open("rb") as file:
        for line in file:
            if (orjson.loads(line)["response"]["status_code"] != 200) == failed:
                yield line


def unanswered_lines(source: Path, answers: Path, outcome: str) -> Iterator[bytes]:
    """Yield an error line for each unanswered request of ``source``. ``outcome`` is ``cancelled`` or ``expired``."""
    with answers.open("rb") as file:
        done = {orjson.loads(line)["custom_id"] for line in file}
    code, message = _ERRORS[outcome]
    for request in read_requests(source):
        if request.custom_id not in done:
            fields = {"id": _new_id(), "custom_id": request.custom_id, "response": None}
            yield orjson.dumps({**fields, "error": {"code": code, "message": message}}) + b"\n"


def sum_usage(answers: Path) -> dict[str, int]:
    """Sum the tokens of all successful answers: input, cached (a part of input) and output."""
    counts = {"input": 0, "cached": 0, "output": 0}
    for line in answer_lines(answers, failed=False):
        usage: dict[str, Any] = orjson.loads(line)["response"]["body"].get("usage") or {}
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        counts["input"] += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        counts["cached"] += details.get("cached_tokens", 0)
        counts["output"] += usage.get("completion_tokens", usage.get("output_tokens", 0))
    return counts
