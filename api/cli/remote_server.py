"""An OpenAI-compatible server as its client sees it: a session, one streamed answer, errors in one line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp
import orjson
from yarl import URL

from ...engine.errors import ConfigError, EngineError
from .options import RemoteOptions

_LONGEST_LINE = 1 << 24


class RemoteError(EngineError):
    """A server that cannot be reached, refuses, or breaks off.

    Args:
        kind: few words that group equal errors: "HTTP 503", "not reachable", "broken off".
        message: one line for its user.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RemoteServer:
    """A server and the model that is asked there. Made by ``connect``."""

    def __init__(self, session: aiohttp.ClientSession, url: URL, model: str) -> None:
        self._session = session
        self._url = url
        self.model = model

    @classmethod
    @asynccontextmanager
    async def connect(cls, options: RemoteOptions) -> AsyncIterator[Self]:
        """Open a session, and ask for the model's name if none was given. Raises ``RemoteError``, ``ConfigError``."""
        url = _base_url(options.url)
        headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
        async with aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=1 << 18,
        ) as session:
            remote = cls(session, url, options.model or "")
            if not remote.model:
                remote.model = await remote._first_model()
            yield remote

    async def _first_model(self) -> str:
        try:
            async with self._session.get(self._url / "models") as response:
                await _refuse_failure(response)
                listed = orjson.loads(await response.read())
            return str(listed["data"][0]["id"])
        except aiohttp.ClientError as error:
            raise _unreachable(self._url, error) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise RemoteError("no model", f"{self._url} lists no model: name one with --model.") from error

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of one answer, whatever the status. Raises RemoteError where none comes."""
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(self._url / path, data=orjson.dumps(body), headers=headers) as response:
                return response.status, response.headers, await response.read()
        except aiohttp.ClientConnectorError as error:
            raise _unreachable(self._url, error) from error
        except aiohttp.ClientError as error:
            raise RemoteError("broken off", f"The connection to {self._url} broke off: {_words(error)}.") from error

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of one streamed answer, the last of which may hold only ``usage``.

        Args:
            path: below the base address: ``"chat/completions"``.
            body: the request; ``model``, ``stream`` and ``stream_options`` are filled in.

        Raises:
            RemoteError: no connection, a refusal, an error inside the stream, or a stream that breaks off.
        """
        asked = {"model": self.model, **body, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(self._url / path, data=orjson.dumps(asked), headers=headers) as response:
                await _refuse_failure(response)
                async for event in _events(response.content):
                    yield event
        except aiohttp.ClientConnectorError as error:
            raise _unreachable(self._url, error) from error
        except aiohttp.ClientError as error:
            raise RemoteError("broken off", f"The connection to {self._url} broke off: {_words(error)}.") from error


def _base_url(text: str) -> URL:
    """The address with its ``/v1``, which may be left out. Raises ``ConfigError`` for anything but http."""
    try:
        url = URL(text if "://" in text else f"http://{text}")
    except ValueError as error:
        raise ConfigError(f"--url must be an address such as http://127.0.0.1:8000/v1, not {text}.") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"--url must be an address such as http://127.0.0.1:8000/v1, not {text}.")
    path = url.path.rstrip("/") or "/v1"
    return url.with_path(path).with_query(None)


def _unreachable(url: URL, error: Exception) -> RemoteError:
    advice = " Start one with: rootgraft serve" if url.host in ("127.0.0.1", "localhost", "::1") else ""
    return RemoteError("not reachable", f"No server answers at {url} ({_words(error)}).{advice}")


def _words(error: Exception) -> str:
    """What went wrong, without the address that the message has already."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the host is not known"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connection refused" if isinstance(error.os_error, ConnectionRefusedError) else "no connection"
    return str(error) or type(error).__name__


async def _refuse_failure(response: aiohttp.ClientResponse) -> None:
    """Raise for anything but 200, with the message in OpenAI's error body if there is one."""
    if response.status == 200:
        return
    raw = await response.read()
    raise RemoteError(f"HTTP {response.status}", f"The server answers HTTP {response.status}: {_message(raw)}")


def _message(raw: bytes) -> str:
    """The text inside an error body of any shape, on one line."""
    text = raw.decode(errors="replace")
    try:
        body = orjson.loads(raw)
        inner = body.get("error", body)
        text = inner if isinstance(inner, str) else str(inner.get("message") or text)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:500] or "(no message)"


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """JSON objects out of server-sent events, each in one ``data:`` line, until ``[DONE]``.

    The body is read to its end after that, which leaves the connection fit for another request.
    """
    rest, done = b"", False
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            break
        for line in lines:
            if line.startswith(b"data:") and not done:
                data = line[5:].strip()
                done = data == b"[DONE]"
                if not done:
                    yield _event(data)
    if not done:
        raise RemoteError("broken off", "The server ended the stream before its last event.")


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise RemoteError("not an event", f"The server sent what is no event: {data[:80]!r}")
    if event.get("error"):
        raise RemoteError("error in the stream", f"The server ended the answer with an error: {_message(data)}")
    return event
