"""Many requests on one connection: each answer is its own request's, in order, whatever comes between and after."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from support.api.api_live import Live, make_state, serve
from support.api.wire.connection_asks import LIMIT, OPTIONS, asked, check_order
from support.api.wire.raw_http import Wire, chunked, request
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.http import connection


@pytest.fixture(scope="module")
def strict_session() -> Iterator[Live]:
    yield from serve(make_state(OPTIONS))


@pytest.fixture
def strict(strict_session: Live) -> Live:
    strict_session.reset()
    return strict_session


@pytest.fixture
def gate(strict: Live) -> Iterator[Callable[[], object]]:
    """Nothing comes out of the frontend before it is called."""
    strict.async_engine.gate = asyncio.Event()
    opened = strict.async_engine.gate
    yield lambda: strict.loop.call_soon_threadsafe(opened.set)
    strict.loop.call_soon_threadsafe(opened.set)


def let_pass(live: Live, seconds: float) -> None:
    """Wait until the server's loop has run all that was to run within so many seconds from now."""
    asyncio.run_coroutine_threadsafe(asyncio.sleep(seconds), live.loop).result(HANG_SECONDS)


GARBAGE = {
    "no HTTP": b"nonsense\r\n\r\n",
    "head of two lengths": b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    "length and chunks": request("broken", "POST", "/", b"12345", headers={"Transfer-Encoding": "chunked"}),
    "compressed in transfer": request(
        "broken", "POST", "/tokenize", headers={"Transfer-Encoding": "gzip, chunked"}, chunks=chunked(b"{}")
    ),
    "no address": b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "not a proxy": b"CONNECT x:80 HTTP/1.1\r\nHost: localhost\r\n\r\nabc",
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "broken chunk": request("broken", "POST", "/v1/completions", chunks=b"zz\r\nnonsense\r\n"),
    "broken second chunk": request("broken", "POST", "/v1/completions", chunks=b"1\r\n{\r\n-5\r\n"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_what_is_malformed_is_answered_once(strict: Live, kind: str) -> None:
    with Wire(strict.url) as wire:
        wire.send(request("a", "GET", "/version"))
        assert [answer.name for answer in wire.read(1)] == ["a"]
        wire.send(GARBAGE[kind] + request("b", "GET", "/version"))
        [answer] = wire.read_all()
    assert answer.status == 400 and json.loads(answer.body)["error"]["code"] == "invalid_http"
    assert answer.headers["connection"] == "close" and ("compressed" in kind) == (b"Compressed bodies" in answer.body)


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_malformed_behind_a_request_does_not_answer_it(
    strict: Live, gate: Callable[[], object], kind: str, stream: bool
) -> None:
    with Wire(strict.url) as wire:
        wire.send(asked("a", stream=stream) + asked("b") + GARBAGE[kind])
        wait_until(lambda: bool(strict.async_engine.seen))
        gate()
        answers = wire.read_all()
    assert [answer.name for answer in answers[:2]] == ["a", "b"]
    assert all(answer.status == 200 for answer in answers[:2])
    assert len(answers) == 2 or [answer.status for answer in answers[2:]] == [400]


def test_bytes_after_the_last_request_do_not_answer_it(strict: Live, gate: Callable[[], object]) -> None:
    """After ``Connection: close`` nothing is read any more."""
    for behind in (b"\r\n", asked("b"), b"nonsense"):
        with Wire(strict.url) as wire:
            wire.send(
                request("a", "POST", "/v1/completions", {"prompt": "a"}, headers={"Connection": "close"}) + behind
            )
            wait_until(lambda: bool(strict.async_engine.seen))
            gate()
            assert [(answer.name, answer.status) for answer in wire.read_all()] == [("a", 200)]


def test_half_a_head_behind_a_request_does_not_cut_its_answer(
    strict: Live, gate: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Wire(strict.url) as wire:
        wire.send(request("first", "GET", "/version"))  # the connection's own time for a head begins before the patch
        assert [answer.name for answer in wire.read(1)] == ["first"]
        monkeypatch.setattr(connection, "HEAD_TIMEOUT", 0.05)
        wire.send(asked("a") + b"GET /health HT")
        wait_until(lambda: bool(strict.async_engine.seen))
        let_pass(strict, 2 * connection.HEAD_TIMEOUT)
        gate()
        assert [(answer.name, answer.status) for answer in wire.read_all()] == [("a", 200)]


def test_trailers_are_no_headers(strict: Live) -> None:
    """Neither the key, nor anything else that a proxy in front may have looked at in the head."""
    body = json.dumps({"prompt": "a"}).encode()
    trailer = b"0\r\nAuthorization: Bearer right\r\nX-Request-Id: smuggled\r\n\r\n"
    with Wire(strict.url) as wire:
        wire.send(request("a", "POST", "/tokenize", key=None, chunks=chunked(body, end=trailer)))
        wire.send(request("b", "POST", "/tokenize", {"prompt": "b"}))
        first, second = wire.read(2)
        assert (first.name, first.status, second.name, second.status) == ("a", 401, "b", 200)
        wire.send(request("c", "POST", "/tokenize", chunks=chunked(body, end=trailer)))
        assert [(answer.name, answer.status) for answer in wire.read(1)] == [("c", 200)]


def test_a_trailer_without_end_is_cut_off(strict: Live) -> None:
    with Wire(strict.url) as wire:
        wire.send(request("a", "POST", "/tokenize", chunks=chunked(b"{}", end=b"0\r\nX-Long: ")))
        answers = wire.flood(b"v" * 65536, 64)
    assert [answer.status for answer in answers] == [431]


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_a_request_to_upgrade_is_answered_in_http_1(strict: Live, upgrade: str) -> None:
    """As Java's client asks for in each first request; what comes behind it is not lost."""
    headers = {
        "Connection": "Upgrade, HTTP2-Settings",
        "Upgrade": upgrade,
        "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABk",
    }
    with Wire(strict.url) as wire:
        wire.send(
            request("a", "POST", "/tokenize", {"prompt": "a"}, headers=headers)
            + request("b", "GET", "/version", headers=headers)
            + request("c", "POST", "/tokenize", {"prompt": "c"})
        )
        assert [(answer.name, answer.status) for answer in wire.read(3)] == [("a", 200), ("b", 200), ("c", 200)]
        wire.send(request("d", "GET", "/version"))
        assert [answer.name for answer in wire.read(1)] == ["d"]
        body = request("e", "POST", "/tokenize", headers=headers, chunks=chunked(b'{"prompt": "e"}'))
        for at in range(0, len(body), 20):
            wire.send(body[at : at + 20])
            time.sleep(0.001)
        assert [(answer.name, answer.status) for answer in wire.read(1)] == [("e", 200)]
        wire.send(request("f", "GET", "/version", headers={**headers, "Connection": "upgrade, close"}))
        assert [(answer.name, answer.status) for answer in wire.read_all()] == [("f", 200)]


def test_who_expects_and_sends_no_body_does_not_lose_the_next_request(strict: Live) -> None:
    """A final answer in the place of ``100 Continue``: whether the body comes is not known, so the connection ends."""
    expects = {"Expect": "100-continue", "Content-Length": "400"}
    for kind in ({"key": None}, {"path": "/nowhere"}):
        sent = {"path": "/tokenize", **kind}
        with Wire(strict.url) as wire:
            wire.send(request("a", "POST", headers=expects, **sent))
            [answer] = wire.read(1)
            assert answer.name == "a" and answer.status in (401, 404) and answer.headers["connection"] == "close"
            wire.send(asked("b"))
            assert wire.read_all() == []
    assert not strict.async_engine.seen


def test_who_expects_and_is_told_to_go_on_keeps_the_connection(strict: Live) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    with Wire(strict.url) as wire:
        for name in "ab":
            expects = {"Expect": "100-continue", "Content-Length": str(len(body))}
            wire.send(request(name, "POST", "/tokenize", headers=expects))
            assert wire.read_interim() == 100
            wire.send(body)
            assert [(answer.name, answer.status) for answer in wire.read(1)] == [(name, 200)]
        wire.send(request("c", "POST", "/tokenize", headers=expects) + body + request("d", "GET", "/version"))
        assert wire.read_interim() == 100
        assert [(answer.name, answer.status) for answer in wire.read(2)] == [("c", 200), ("d", 200)]


def test_a_request_behind_one_that_ends_the_connection_does_not_run(strict: Live) -> None:
    """Its client asks it again elsewhere: it would run twice."""
    with Wire(strict.url) as wire:
        wire.send(request("a", "POST", "/tokenize", headers={"Content-Length": str(LIMIT + 1)}) + b"x" * LIMIT)
        [answer] = wire.read(1)
        assert (answer.name, answer.status) == ("a", 413)
        wire.send(b"x" + asked("b"))
        assert wire.read_all() == []
    with Wire(strict.url) as wire:
        wire.send(request("c", "GET", "/version"))
        assert [answer.name for answer in wire.read(1)] == ["c"]
    assert not strict.async_engine.seen


def test_a_client_that_leaves_with_a_request_behind_it_is_noticed(strict: Live, gate: Callable[[], object]) -> None:
    with Wire(strict.url) as wire:
        wire.send(asked("a") + asked("b"))
        wait_until(lambda: bool(strict.async_engine.seen))
    wait_until(lambda: len(strict.async_engine.aborted) == 1)
    wait_until(lambda: strict.state.limits.active == 0)
    assert len(strict.async_engine.seen) == 1


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_in_order_however_requests_are_cut(strict: Live, seed: int) -> None:
    check_order(strict.url, random.Random(seed))


def test_requests_of_a_half_closed_connection_are_answered(strict: Live, gate: Callable[[], object]) -> None:
    with Wire(strict.url) as wire:
        wire.send(asked("a") + asked("b"))
        wait_until(lambda: bool(strict.async_engine.seen))
        wire.socket.shutdown(socket.SHUT_WR)
        gate()
        data = b""
        while part := wire.socket.recv(65536):
            data += part
        assert data.count(b"HTTP/1.1 200 ") == 2
    wait_until(lambda: strict.state.limits.active == 0)
