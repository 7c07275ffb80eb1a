"""Requests of every kind for one connection, and the check that each answer on it is its own request's, in order."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from random import Random
from typing import Any

from rootgraft.api.config import ServerConfig
from support.api.wire.raw_http import Wire, chunked, request

LIMIT = 4096
ORIGIN = "http://page.example"
Ask = Callable[[str], tuple[bytes, int]]
"""Returns the request of an id, and the status of its answer."""

OPTIONS = ServerConfig(max_request_bytes=LIMIT, api_key=("right",), allowed_origins=(ORIGIN,))


def asked(name: str, **fields: Any) -> bytes:
    """A completion that is named by its request id, and whose answer takes as long as the gate is shut."""
    return request(name, "POST", "/v1/completions", {"prompt": name, **fields})


WELL: dict[str, Ask] = {
    "tokenize": lambda name: (request(name, "POST", "/tokenize", {"prompt": name}), 200),
    "in chunks": lambda name: (
        request(name, "POST", "/tokenize", chunks=chunked(b'{"prompt": "x"}', 3, b"0\r\nX-Key: y\r\n\r\n")),
        200,
    ),
    "stream": lambda name: (asked(name, stream=True), 200),
    "no JSON": lambda name: (request(name, "POST", "/v1/completions", b"{"), 400),
    "not declared as JSON": lambda name: (
        request(name, "POST", "/tokenize", b"{}", headers={"Content-Type": "text/plain"}),
        415,
    ),
    "wrong key": lambda name: (request(name, "POST", "/tokenize", b"x" * 3000, key="wrong"), 401),
    "no route": lambda name: (request(name, "POST", "/nowhere", b"x" * 3000), 404),
    "a body that nobody reads": lambda name: (request(name, "GET", "/version", b"GET / HTTP/1.1\r\n\r\n"), 200),
    "head": lambda name: (request(name, "HEAD", "/version"), 405),
    "options": lambda name: (request(name, "OPTIONS", "/version"), 405),
    "preflight": lambda name: (
        request(
            name,
            "OPTIONS",
            "/v1/completions",
            b"GET / HTTP/1.1\r\n\r\n",
            key=None,
            headers={"Origin": ORIGIN, "Access-Control-Request-Method": "POST"},
        ),
        200,
    ),
    "refused preflight": lambda name: (
        request(
            name,
            "OPTIONS",
            "/v1/completions",
            key=None,
            headers={"Origin": "http://other", "Access-Control-Request-Method": "POST"},
        ),
        400,
    ),
}
LAST: dict[str, Ask] = {
    "too large": lambda name: (request(name, "POST", "/tokenize", b"x" * (LIMIT + 1)), 413),
    "too large in chunks": lambda name: (
        request(name, "POST", "/tokenize", chunks=chunked(b"x" * LIMIT * 2, 1000)),
        413,
    ),
    "compressed": lambda name: (request(name, "POST", "/tokenize", b"x", headers={"Content-Encoding": "gzip"}), 415),
    "close": lambda name: (request(name, "GET", "/version", headers={"Connection": "close"}), 200),
    "broken": lambda name: (b"nonsense\r\n\r\n", 400),
}


def check_order(url: str, draw: Random, closing: Collection[str] = tuple(LAST)) -> None:
    """Send random requests in random pieces over some connections; what ends one comes last, and more behind that.

    Args:
        closing: which of ``LAST`` end the connection.
    """
    for _ in range(10):
        kinds = [draw.choice(list(WELL)) for _ in range(draw.randrange(1, 6))]
        made = [WELL[kind](f"{number}") for number, kind in enumerate(kinds)]
        if end := draw.choice([None, *LAST]):
            made.append(LAST[end](f"{len(kinds)}"))
        data = b"".join(sent for sent, _ in made)
        behind = b"" if end not in closing else draw.choice([b"", asked("behind"), b"\r\n", b"x" * 300])
        methods = [re.match(rb"[A-Z]+", sent) for sent, _ in made]
        with Wire(url) as wire:
            wire.heads = [number for number, match in enumerate(methods) if match and match[0] == b"HEAD"]
            cuts = sorted(draw.randrange(len(data + behind)) for _ in range(draw.randrange(4)))
            for begin, stop in zip([0, *cuts], [*cuts, None], strict=True):
                wire.send((data + behind)[begin:stop])
                time.sleep(draw.choice([0, 0, 0.002]))
            answers = wire.read_all() if end in closing else wire.read(len(made))
        wanted = [status for _, status in made]
        if end == "broken" and len(answers) == len(kinds):
            wanted.pop()  # an answer to what is no request may be left out where others were unanswered
        where = f"{kinds} {end} {behind!r}"
        assert [answer.status for answer in answers] == wanted, where
        names = [f"{at}" for at in range(len(kinds) + (end not in (None, "broken")))]
        assert [answer.name for answer in answers][: len(names)] == names, where
