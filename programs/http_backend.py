"""HTTP backend: calls an OpenAI-compatible server over blocking HTTP, on the threads of the branches.

The server must have these features: for ``gen`` chat completions; for ``warm`` chat completions with ``max_tokens: 0``;
for ``select`` the route ``/tokenize`` with ``messages``, and completions of token ids with ``echo``.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import SHUT_RDWR, socket
from threading import Event, Lock
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from .branch_calls import (
    AnswerFormat,
    CallParams,
    Completion,
    FormatKind,
    Prompt,
    first_difference,
    session_name,
    stop_string,
)
from .errors import CallFailed
from .token_report import Report

_ATTEMPTS = 6
# Limits and pauses in seconds.
_LONGEST_PAUSE = 30.0
_RETRIED = (429, 503)
_CONNECT_SECONDS = 10.0


class HttpBackend:
    """Backend that calls a server, with the methods of ``branch_calls.ModelBackend``.

    Args:
        url: address of the server, with or without ``/v1``.
        model: name of the model; None for the first one that the server lists.
        timeout: longest time in seconds without data from the server while a call waits for it.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the address must be a URL such as http://127.0.0.1:8000/v1, not {url!r}")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("the address must not contain a user or a query: give a key as api_key")
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host = parts.netloc
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._model = model
        self._timeout = timeout
        self._session = uuid4().hex
        self._closed = Event()
        # The lock prevents other threads from adding a socket after ``close`` has shut down all sockets.
        self._closing = Lock()
        self._sockets: set[socket] = set()
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @cached_property
    def _default_model(self) -> str:
        return self._model if self._model is not None else str(self._json("GET", "/v1/models", None)["data"][0]["id"])

    def stream(self, prompt: Prompt, params: CallParams) -> Generator[str, None, Completion]:
        """Stream one chat completion."""
        body = self._conversation(prompt) | self._key(prompt) | _param_fields(params)
        texts: list[str] = []
        last: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        with self._response("POST", "/v1/chat/completions", body) as response:
            for event in _events(response):
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    if text := choice["delta"].get("content"):
                        texts.append(text)
                        yield text
                    if choice.get("finish_reason"):
                        last = choice
        if not last:
            raise CallFailed("the server closed the connection before the end of the answer")
        shortest = last.get("min_completion_tokens")
        stop = stop_string(last.get("stop_reason"), params.stop)
        return Completion("".join(texts), str(last["finish_reason"]), _report(usage), stop, shortest)

    def score(self, prompt: Prompt, choices: Sequence[str]) -> tuple[list[list[float]], Report]:
        """Send the choices as a tree, and let the server compute the logprobs of their tokens."""
        base = self._tokens(prompt)
        wholes = [self._tokens(prompt.followed_by(choice)) for choice in choices]
        start = first_difference(base, wholes)
        body = {
            "model": self._model_of(prompt),
            "query": wholes[0][:start],
            "items": [[]],
            "labels": [whole[start:] for whole in wholes],
            "logprobs": True,
        }
        answer = self._json("POST", "/v1/score", body | self._key(prompt))
        return answer["logprobs"][0], _report(answer["usage"])

    def warm(self, prompt: Prompt, pin: int) -> Report:
        """Request a chat completion without tokens."""
        body = self._conversation(prompt) | self._key(prompt) | {"max_tokens": 0}
        if pin:
            body["cache_control"] = {"type": "ephemeral", "ttl": f"{pin}s"}
        return _report(self._json("POST", "/v1/chat/completions", body)["usage"])

    def close(self) -> None:
        """End the connections of all calls, which then fail. The server aborts their requests."""
        with self._closing:
            self._closed.set()
            for each in self._sockets:
                # The server may have closed the socket.
                with suppress(OSError):
                    # The TLS layer is not closed, because the socket's reader still uses it.
                    socket.shutdown(each, SHUT_RDWR)

    def _model_of(self, prompt: Prompt) -> str:
        return self._default_model if prompt.adapter is None else prompt.adapter

    def _key(self, prompt: Prompt) -> dict[str, Any]:
        return {"prompt_cache_key": session_name(self._session, prompt.branch)}

    def _tokens(self, prompt: Prompt) -> list[int]:
        return list(self._json("POST", "/tokenize", self._conversation(prompt))["tokens"])

    def _conversation(self, prompt: Prompt) -> dict[str, Any]:
        body = {"model": self._model_of(prompt), "messages": list(prompt.messages)}
        return body | ({"continue_final_message": True, "add_generation_prompt": False} if prompt.is_open else {})

    def _json(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        with self._response(method, path, body) as response:
            try:
                return dict(json.loads(response.read()))
            except ValueError as error:
                raise CallFailed(f"the server's answer to {path} is not JSON") from error

    @contextmanager
    def _response(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[HTTPResponse]:
        """Context manager: send a request. 429 and 503 are retried after Retry-After.

        Yields a response of status 200.
        """
        try:
            data = None if body is None else json.dumps(body).encode()
        except TypeError as error:
            raise CallFailed(f"an argument is not a JSON value: {error}") from error
        try:
            for attempt in range(1, _ATTEMPTS + 1):
                with self._connection() as connection:
                    connection.request(method, self._root + path, data, self._headers)
                    response = connection.getresponse()
                    if response.status == 200:
                        yield response
                        return
                    message = _message(response)
                if response.status not in _RETRIED or attempt == _ATTEMPTS:
                    raise CallFailed(f"the server answers HTTP {response.status}: {message}")
                self._closed.wait(_pause(response, attempt))
        except (OSError, HTTPException, CallFailed) as error:
            if self._closed.is_set():
                raise CallFailed("the session is closed") from error
            if isinstance(error, CallFailed):
                raise
            if isinstance(error, TimeoutError):
                raise CallFailed(f"{self._host} has sent nothing for {self._timeout:g} s (timeout)") from error
            raise CallFailed(f"no answer from {self._host}: {error}") from error

    @contextmanager
    def _connection(self) -> Iterator[HTTPConnection]:
        """Context manager: open a connection for one request. ``close`` may end the connection."""
        connection = self._kind(self._host, timeout=min(_CONNECT_SECONDS, self._timeout))
        try:
            try:
                connection.connect()
            except TimeoutError as error:
                raise CallFailed(f"{self._host} did not accept a connection within {connection.timeout:g} s") from error
            opened = connection.sock
            opened.settimeout(self._timeout)
            with self._closing:
                if self._closed.is_set():
                    raise CallFailed("the session is closed")
                self._sockets.add(opened)
            try:
                yield connection
            finally:
                with self._closing:
                    self._sockets.discard(opened)
        finally:
            connection.close()


def _param_fields(params: CallParams) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.seed is not None:
        fields["seed"] = params.seed
    return fields | (_format_fields(params.format) if params.format else {})


def _format_fields(format: AnswerFormat) -> dict[str, Any]:
    match format.kind:
        case FormatKind.SCHEMA:
            json_schema = {"name": "answer", "schema": format.value}
            return {"response_format": {"type": "json_schema", "json_schema": json_schema}}
        case FormatKind.REGEX:
            return {"structured_outputs": {"regex": format.value}}
        case FormatKind.CHOICES:
            return {"structured_outputs": {"choice": format.value}}


def _report(usage: dict[str, Any], calls: int = 1) -> Report:
    prompt, completion = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return Report(
        calls,
        usage.get("prompt_tokens") or 0,
        prompt.get("cached_tokens") or 0,
        prompt.get("forked_tokens") or 0,
        usage.get("completion_tokens") or 0,
        completion.get("drafted_tokens") or 0,
        completion.get("forced_tokens") or 0,
    )


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Parse server-sent events into JSON objects until ``[DONE]``. Raises CallFailed for an error event."""
    for line in response:
        data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
        if data == b"[DONE]":
            return
        if data:
            event = json.loads(data)
            if error := event.get("error"):
                raise CallFailed(str(error.get("message") or error))
            yield event


def _message(response: HTTPResponse) -> str:
    """Return the message of an error body in any format."""
    text = response.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:500]


def _pause(response: HTTPResponse, attempt: int) -> float:
    """Return the number of seconds until the next attempt, by Retry-After or else by exponential backoff."""
    retry_after = response.headers.get("Retry-After") or ""
    return min(float(retry_after) if retry_after.isdecimal() else 0.25 * 2**attempt, _LONGEST_PAUSE)
