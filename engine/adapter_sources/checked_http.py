"""Checked HTTP: requests that connect only to allowed addresses, and follow redirects only to allowed places.

The address is checked when its socket is made, and exactly this address is used, so that a name cannot resolve to
another address between check and use. With a proxy from the environment (``HTTPS_PROXY``), the proxy looks up names and
connects; addresses in URLs are checked nevertheless. No cookies and no other credentials are sent.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from ..errors import RequestError, quoted
from .remote_files import TransferBroken

_MOST_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CONNECT_SECONDS = 10
_SILENT_SECONDS = 30
_CHUNK = 1 << 18
_CLOSE_POLLS = 50
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)
_PORTS = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class CheckedHttp:
    """Makes requests under rules.

    Attributes:
        allows_address: returns whether connections to an IP address are allowed.
        may_follow: returns whether a redirect may lead to a URL; scheme and address are checked in addition.
        trusted: host and port of URLs that the operator has named; their addresses are not checked.
        plain: whether ``http`` is allowed as well, for the operator's own Hub.
        secrets: headers that are sent only to the origin of the first URL.
    """

    allows_address: Callable[[str], bool]
    may_follow: Callable[[SplitResult], bool]
    trusted: frozenset[tuple[str, int]] = frozenset()
    plain: bool = False
    secrets: Mapping[str, str] = field(default_factory=dict)

    @asynccontextmanager
    async def request(
        self, method: str, url: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the response after all redirects.

        Raises:
            RequestError: a redirect or an address is not allowed.
            TransferBroken: there is no connection or no answer, or the connection broke off; also while the body is
                read.
        """
        first = _origin(urlsplit(url))
        for _ in range(_MOST_REDIRECTS + 1):
            parts = self._checked(url)
            sent = {"Accept-Encoding": "identity", **(headers or {})}
            sent |= self.secrets if _origin(parts) == first else {}
            async with self._sent(method, url, parts, sent) as response:
                location = response.headers.get("Location")
                if response.status not in _REDIRECTS or location is None:
                    yield response
                    return
            url = self._redirected(url, location)
        raise RequestError(f"{_shown(url)} redirects more than {_MOST_REDIRECTS} times.")

    def _checked(self, url: str) -> SplitResult:
        parts = urlsplit(url)
        if parts.scheme not in (("https", "http") if self.plain else ("https",)) or not parts.hostname:
            raise RequestError(f"{_shown(url)} is not a URL with https://.", code="adapter_source_not_allowed")
        return parts

    def _redirected(self, url: str, location: str) -> str:
        """Return the target URL of a redirect. Raises RequestError if it may not be followed, or is not a URL."""
        try:
            target = urljoin(url, location)
        except ValueError:
            target = ""
        if not self._leads_well(target):
            raise RequestError(
                f"{_shown(url)} redirects to {_shown(target or location)}, which --adapter-sources does not list.",
                code="adapter_source_not_allowed",
            )
        return target

    def _leads_well(self, target: str) -> bool:
        try:
            parts = urlsplit(target)
            _origin(parts)
        except ValueError:
            return False
        return parts.username is None and self.may_follow(parts)

    @asynccontextmanager
    async def _sent(
        self, method: str, url: str, parts: SplitResult, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        _, host, port = _origin(parts)
        is_trusted, proxy = (host, port) in self.trusted, _proxy_for(parts)
        refused: list[str] = []
        sockets: list[socket.socket] = []

        def open_socket(info: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
            address = str(info[4][0])
            if not (is_trusted or proxy or self.allows_address(address)):
                refused.append(address)
                raise OSError(f"{address} is not allowed")
            sockets.append(socket.socket(info[0], info[1], info[2]))
            return sockets[-1]

        if proxy and _is_address(host) and not (is_trusted or self.allows_address(host)):
            raise _refusal(host, host)
        try:
            async with _session(open_socket) as session:
                try:
                    response = await session.request(
                        method, URL(url, encoded=True), headers=headers, allow_redirects=False, proxy=proxy
                    )
                except (*_BROKEN, ValueError) as error:
                    if refused:
                        raise _refusal(host, refused[0]) from None
                    raise TransferBroken(f"{host} does not answer: {_reason(error)}") from error
                async with response:
                    try:
                        yield response
                    finally:
                        if response.connection is not None and response.connection.transport is not None:
                            response.connection.transport.abort()  # does not wait for the rest of the body
        finally:
            await _until_closed(sockets)


def _session(open_socket: aiohttp.SocketFactoryType) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(socket_factory=open_socket, ssl=ssl.create_default_context(), use_dns_cache=False)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


async def _until_closed(sockets: Sequence[socket.socket]) -> None:
    """Wait until TLS connections are closed, half a second at most: the event loop may be closed right after."""
    for _ in range(_CLOSE_POLLS):
        if all(each.fileno() < 0 for each in sockets):
            return
        await asyncio.sleep(0.01)


async def read_chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the body of a response. Raises TransferBroken."""
    try:
        async for chunk in response.content.iter_chunked(_CHUNK):
            yield chunk
    except _BROKEN as error:
        raise TransferBroken(f"{response.url.host} broke off: {_reason(error)}") from error


def _refusal(host: str, address: str) -> RequestError:
    return RequestError(
        f"{host} has the address {address}, which is neither public nor in a network that --adapter-sources lists.",
        code="adapter_source_not_allowed",
    )


def _proxy_for(parts: SplitResult) -> str | None:
    """Return the proxy that the environment names for a URL; None if there is none, or ``NO_PROXY`` excludes it."""
    proxy = getproxies().get(parts.scheme)
    return None if proxy is None or proxy_bypass(parts.netloc.rpartition("@")[2]) else proxy


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _origin(parts: SplitResult) -> tuple[str, str, int]:
    """Return scheme, host and port. Raises ValueError for an invalid port."""
    return parts.scheme, (parts.hostname or "").lower(), parts.port or _PORTS.get(parts.scheme, 0)


def _shown(url: str) -> str:
    """Return a URL for errors: without its query, which may be a signature."""
    return quoted(url.partition("?")[0])


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        return "its certificate is not accepted"
    if isinstance(error, TimeoutError):
        return f"nothing came for {_SILENT_SECONDS} seconds"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "no connection"
    return "the connection broke off" if isinstance(error, aiohttp.ClientError | OSError) else "no HTTP"
