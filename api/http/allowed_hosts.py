"""Allowed hosts: without API keys, a request must name a host that no web page can point at this server (DNS
rebinding).

If the name ``evil.example`` is made to resolve to this machine, a browser treats a page of ``evil.example`` and this
server as the same origin. The page may then do everything that a client on this port may do. The ``Host`` header
reveals such a request.
"""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from ..access.api_keys import KeyRing
from ..access.caller import RequestFacts
from ..error_responses import error_response
from ..errors import ErrorReply

_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\[\]:/@\s]+)(?::[0-9]{1,5})?")
_LOCAL_ZONES = (".localhost", ".local", ".internal", ".home.arpa")
"""Zones that are not in the public DNS, so the owner of a web page has no name in them."""
PROBES = frozenset(
    {"/health", "/health/live", "/health/ready", "/ready", "/ping", "/v2/health/live", "/v2/health/ready"}
)


def name_of(host: str) -> str | None:
    """Return the name in a ``Host`` header in lower case, without port, brackets and final dot; None if malformed."""
    found = _HOST.fullmatch(host)
    return None if found is None else found["name"].strip("[]").lower().removesuffix(".")


def is_loopback(name: str) -> bool:
    """Return whether a name or an address means this machine, whatever DNS server resolves it."""
    address = _address(name)
    return name == "localhost" or name.endswith(".localhost") if address is None else address.is_loopback


def is_private_name(name: str) -> bool:
    """Return whether a name cannot exist in the public DNS: an address, a single label, or a name in a local zone."""
    return _address(name) is not None or "." not in name or name.endswith(_LOCAL_ZONES)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


class AllowedHosts:
    """Middleware that refuses requests with foreign names in ``Host`` and ``Origin`` with 403, before any other check.

    On a connection to a loopback address, only names of loopback are accepted. On a connection to another address,
    names that cannot exist in the public DNS are accepted. Health probes are always accepted, and so are requests on a
    Unix domain socket, which no browser can reach.

    Args:
        names: further names that are accepted, in lower case; ``*`` stands for all names. If names are given, hosts are
            checked even if the server has API keys.
        origins: origins whose pages may send requests to this server (CORS).
    """

    def __init__(self, app: ASGIApp, *, keys: KeyRing, names: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._names = frozenset(name.lower() for name in names)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (reply := self.fault(scope)) is not None:
            scope["state"] = {"request_id": uuid.uuid4().hex, "facts": RequestFacts()} | scope.get("state", {})
            await error_response(reply, scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def fault(self, scope: Scope) -> ErrorReply | None:
        """Return the error response for a request, judged by its headers; None if the request may be served."""
        server = scope.get("server")
        is_open = (self._keys.in_use and not self._names) or "*" in self._names or scope["path"] in PROBES
        if is_open or server is None or server[1] is None:
            return None
        local = is_loopback(str(server[0]))
        for key, value in scope["headers"]:
            if key == b"host" and not self._serves(name_of(value.decode("latin-1")), local=local):
                return _refusal("Host", value.decode("latin-1"))
            if key == b"origin" and not self._serves_page(value.decode("latin-1"), local=local):
                return _refusal("Origin", value.decode("latin-1"))
        return None

    def _serves(self, name: str | None, *, local: bool) -> bool:
        if name is None:
            return False
        if any(name == each or (each.startswith("*.") and name.endswith(each[1:])) for each in self._names):
            return True
        return is_loopback(name) or (not local and is_private_name(name))

    def _serves_page(self, origin: str, *, local: bool) -> bool:
        """Return whether a page of this origin may send requests.

        Schemes other than http and https belong to programs, such as an editor.
        """
        if self._origins & {origin, "*"}:
            return True
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        if parts.scheme not in ("http", "https"):
            return bool(parts.scheme)
        return self._serves(name_of(parts.netloc), local=local)


def _refusal(header: str, value: str) -> ErrorReply:
    return ErrorReply(
        403,
        f"The {header} '{value[:100]}' is not allowed without API keys, because any web page could use it. Start the "
        "server with API keys, or allow the name with --allowed-hosts.",
        code="host_not_allowed",
    )
