"""Remote server: async HTTP client for an OpenAI-compatible server, with streamed and timed answers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import aiohttp
import orjson
from yarl import URL

from ...engine.errors import ConfigError, EngineError
from ..exact_json import dumps_exact
from ..http.run_record import running_servers
from .options import RemoteOptions

_LONGEST_LINE = 1 << 24
_HEALTH_SECONDS, _HEALTH_TIMEOUT = 10.0, 60.0  # seconds between two health checks, and time limit of one
_SILENT_SECONDS = 600.0  # Largest number of seconds between two streamed tokens.
_CONNECT_SECONDS = 10.0
_DEFAULT_ADDRESS = "http://127.0.0.1:8000/v1"


class RemoteError(EngineError):
    """A server cannot be reached, refuses a request, or ends an answer too early.

    Args:
        kind: kind of the error for counting: "HTTP 503", "not reachable", "broken off".
        message: one line for the user.
        code: code of the server's error, such as "context_length_exceeded"; empty if it has none.
    """

    def __init__(self, kind: str, message: str, code: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.code = code


@dataclass(slots=True)
class Timing:
    """Timing of one request, in seconds; ``started`` and ``ended`` are on the scale of ``time.perf_counter``.

    Attributes:
        ended: time of the end of the stream, or of the failure.
        ttft: seconds to the first token; None without a token.
        gaps: seconds between consecutive arrivals of text. An arrival may contain several tokens.
        prompt: number of prompt tokens in the server's usage. ``cached`` of them were cached (None if not reported).
        completion: number of output tokens in the server's usage, else the number of arrivals.
        finish: the server's finish reason.
        error: the kind of failure, or None.
        message: description of the failure on one line.
        code: code of the server's error; empty without one.
    """

    started: float = 0.0
    ended: float = 0.0
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int | None = None
    completion: int = 0
    finish: str | None = None
    error: str | None = None
    message: str | None = None
    code: str = ""

    @property
    def latency(self) -> float:
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens."""
        return sum(self.gaps) / (self.completion - 1) if self.completion > 1 and self.gaps else None


class RemoteServer:
    """Client session with a server and one of its models. Use ``connect`` to create it."""

    def __init__(self, session: aiohttp.ClientSession, url: URL, model: str) -> None:
        self._session = session
        self._url = url
        self.model = model

    @classmethod
    @asynccontextmanager
    async def connect(cls, options: RemoteOptions, *, uds: str | None = None) -> AsyncIterator[Self]:
        """Context manager: open a session, by default with the first listed model.

        Raises ``RemoteError``, ``ConfigError``.

        Args:
            uds: Unix domain socket to which to connect, whatever the host of the address is.
        """
        url = _base_url(_default_url() if options.url is None else options.url)
        key = os.environ.get("ROOTGRAFT_API_KEY") if options.api_key is None else options.api_key
        if not (key or "").isprintable():
            raise ConfigError("--api-key must be UTF-8 text without line breaks and other control characters.")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession(
            headers=headers,
            timeout=_timeout(),
            connector=aiohttp.TCPConnector(limit=0) if uds is None else aiohttp.UnixConnector(uds, limit=0),
            read_bufsize=1 << 18,
        ) as session:
            server = cls(session, url, options.model or "")
            if not server.model:
                server.model = await server._first_model()
            yield server

    @property
    def url(self) -> str:
        """Base address of paths such as ``chat/completions``."""
        return str(self._url)

    async def _first_model(self) -> str:
        try:
            async with self._session.get(self._url / "models", timeout=_timeout(_HEALTH_TIMEOUT)) as response:
                await _raise_for_status(response)
                models = orjson.loads(await response.read())
            return str(models["data"][0]["id"])
        except aiohttp.ClientError as error:
            raise _unreachable(self._url, error) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise RemoteError("no model", f"{self._url} lists no models: name one with --model.") from error

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path. Raises RemoteError for a refusal, a missing answer, or other content."""
        try:
            async with self._session.get(self._url / path, timeout=_timeout(_HEALTH_TIMEOUT)) as response:
                await _raise_for_status(response)
                found = orjson.loads(await response.read())
        except aiohttp.ClientError as error:
            raise _unreachable(self._url, error) from error
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RemoteError("not JSON", f"{self._url / path} sent a response that is not a JSON object.")
        return found

    async def post(self, path: str, body: Mapping[str, Any] | bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Send JSON or a file. Returns status, headers and body for any status.

        Raises RemoteError without an answer.
        """
        async with self._sent("POST", path, body) as response:
            return response.status, response.headers, await response.read()

    async def download(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Send a request. Returns the file in its answer. Raises like ``call``."""
        async with self._sent("POST", path, body) as response:
            await _raise_for_status(response)
            return await response.read()

    async def call(self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None) -> Any:
        """Send a request. Returns the JSON of its answer. Raises RemoteError for a refusal, or without an answer."""
        # A POST request may start the download of an adapter, so its time is not limited.
        silent = _HEALTH_TIMEOUT if method == "GET" else None
        async with self._sent(method, path, body, silent) as response:
            await _raise_for_status(response)
            raw = await response.read()
        try:
            return orjson.loads(raw)
        except ValueError as error:
            raise RemoteError("no JSON", f"{self._url} sent a response that is not JSON: {raw[:80]!r}") from error

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of one streamed answer; the last event may contain only ``usage``.

        Args:
            path: path relative to the base address: ``"chat/completions"``.
            body: request body; ``model``, ``stream`` and ``stream_options`` are added.

        Raises:
            RemoteError: no connection, a refusal, an error event, or a stream that ends too early.
        """
        full_body = {"model": self.model, **body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._sent("POST", path, full_body, _SILENT_SECONDS) as response:
            await _raise_for_status(response)
            async for event in _events(response.content):
                yield event

    async def watch(self) -> NoReturn:
        """Request the server's health repeatedly. An answer with any status counts as healthy.

        Raises:
            RemoteError: the server has not answered for a minute, or cannot be reached.
        """
        while True:
            try:
                async with (
                    asyncio.timeout(_HEALTH_TIMEOUT),
                    self._session.get(self._url.with_path("/health")) as response,
                ):
                    await response.read()
            except (TimeoutError, aiohttp.ClientError) as error:
                raise RemoteError("not answering", f"The server at {self._url} no longer responds.") from error
            await asyncio.sleep(_HEALTH_SECONDS)

    @asynccontextmanager
    async def _sent(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None, silent: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Context manager: send a request.

        Raises RemoteError, also if the server sends nothing for ``silent`` seconds.
        """
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        headers = {} if body is None else {"Content-Type": kind}
        try:
            data = body if body is None or isinstance(body, bytes) else dumps_exact(body)
        except UnicodeEncodeError as error:
            # Bytes from the terminal that are not UTF-8 become lone surrogates in the text.
            raise RemoteError("no UTF-8", "The text is not valid UTF-8. Try: iconv -t UTF-8") from error
        try:
            timeout = _timeout(silent)
            async with self._session.request(
                method, self._url / path, data=data, headers=headers, timeout=timeout
            ) as response:
                yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _unreachable(self._url, error) from error
        except aiohttp.SocketTimeoutError as error:
            raise _silent(self._url) from error
        except aiohttp.ClientError as error:
            raise RemoteError("broken off", f"The connection to {self._url} was lost: {_cause(error)}.") from error


async def timed(
    server: RemoteServer,
    path: str,
    body: dict[str, Any],
    on_text: Callable[[str], None] | None = None,
    on_thought: Callable[[str], None] | None = None,
) -> Timing:
    """Send one request and measure it. Failures are recorded in the timing, not raised.

    Args:
        path: path relative to the server's base address.
        body: request body without the fields that ``RemoteServer.stream`` adds.
        on_text: called with each piece of the answer.
        on_thought: called with each piece of the reasoning before the answer, whose tokens are timed, too.
    """
    timing = Timing(started=time.perf_counter())
    arrivals, last = 0, 0.0
    try:
        async for event in server.stream(path, body):
            for choice in event.get("choices") or ():
                timing.finish = choice.get("finish_reason") or timing.finish
                delta = choice.get("delta") or {}
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                text = choice.get("text") or delta.get("content")
                if not (thought or text):
                    continue
                now = time.perf_counter()
                arrivals += 1
                if timing.ttft is None:
                    timing.ttft = now - timing.started
                else:
                    timing.gaps.append(now - last)
                last = now
                if thought and on_thought:
                    on_thought(thought)
                if text and on_text:
                    on_text(text)
            if usage := event.get("usage"):
                timing.prompt = usage.get("prompt_tokens") or 0
                timing.completion = usage.get("completion_tokens") or 0
                timing.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    except RemoteError as error:
        timing.error, timing.message, timing.code = error.kind, str(error), error.code
    timing.ended = time.perf_counter()
    timing.completion = timing.completion or arrivals
    return timing


def _timeout(silent: float | None = None) -> aiohttp.ClientTimeout:
    """Return the time limits of a request. ``silent``: longest pause of the server; None for no limit."""
    return aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=silent)


def _default_url() -> str:
    """Return the address for a command without one. Raises ConfigError if several servers run on this machine."""
    if url := os.environ.get("ROOTGRAFT_URL"):
        return url
    urls = [f"{each.url}/v1" for each in running_servers({os.getuid()}) if each.url.startswith("http")]
    if len(urls) > 1 and _DEFAULT_ADDRESS not in urls:
        raise ConfigError(f"several servers run here; choose one with --url: {', '.join(urls)}")
    return urls[0] if len(urls) == 1 else _DEFAULT_ADDRESS


def _base_url(text: str) -> URL:
    """Parse the address. A missing path becomes ``/v1``. Raises ``ConfigError`` for schemes other than HTTP."""
    try:
        url = URL(text if "://" in text else f"http://{text}")
    except ValueError as error:
        raise ConfigError(f"--url must be an address such as http://127.0.0.1:8000/v1, not {text}.") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"--url must be an address such as http://127.0.0.1:8000/v1, not {text}.")
    path = url.path.rstrip("/") or "/v1"
    return url.with_path(path).with_query(None)


def _unreachable(url: URL, error: Exception) -> RemoteError:
    if isinstance(error, aiohttp.SocketTimeoutError):
        return _silent(url)
    is_here = url.host in ("127.0.0.1", "localhost", "::1")
    advice = " Start one with: rootgraft serve. Or chat without a server: rootgraft run" if is_here else ""
    return RemoteError("not reachable", f"No server responds at {url} ({_cause(error)}).{advice}")


def _silent(url: URL) -> RemoteError:
    return RemoteError("not answering", f"The server at {url} accepts connections but does not respond.")


def _cause(error: Exception) -> str:
    """Return the cause of the error without the address, which the message contains already."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "unknown host"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connection refused" if isinstance(error.os_error, ConnectionRefusedError) else "no connection"
    return str(error) or type(error).__name__


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    """Raise RemoteError for a status other than 200, with the message of the error body."""
    if response.status == 200:
        return
    message, code = _error(await response.read())
    raise RemoteError(f"HTTP {response.status}", f"The server returned HTTP {response.status}: {message}", code)


def _error(raw: bytes) -> tuple[str, str]:
    """Return the message of an error body in any format, on one line, and the error's code; "" without a code."""
    text, code = raw.decode(errors="replace"), ""
    try:
        body = orjson.loads(raw)
        error = body.get("error", body)
        text = error if isinstance(error, str) else str(error.get("message") or text)
        code = "" if isinstance(error, str) else str(error.get("code") or "")
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:500] or "(no message)", code


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Parse server-sent events, each one ``data:`` line, into JSON objects until ``[DONE]``.

    After ``[DONE]`` the body is read to its end, so that the connection can be reused.
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
        raise RemoteError("not an event", f"The server sent an invalid event: {data[:80]!r}")
    if event.get("error"):
        message, code = _error(data)
        raise RemoteError("error in the stream", f"The server ended the response with an error: {message}", code)
    return event
