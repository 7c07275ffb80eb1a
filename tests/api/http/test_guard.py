"""What stands before the routes: keys, limits, request ids, and the last word on errors."""

from __future__ import annotations

import gzip
import json
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from support.api.api_live import Live, make_state, serve
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.api.http import connection, guard
from rootgraft.engine.errors import CapacityError, ConfigError, DeadlineExceeded, EngineDead, EngineError

COMPLETIONS = "/v1/completions"
Start = Callable[[ServerConfig], Live]


@pytest.fixture(scope="module")
def locked() -> Iterator[Live]:
    """A server with two keys that reads at most 2,000 bytes of body."""
    yield from serve(make_state(ServerConfig(api_key=("first-key", "zweiter"), max_request_bytes=2000)))


@pytest.mark.parametrize(
    "value",
    [None, "", "Bearer", "Bearer wrong", "first-key", "Basic first-key", "Bearer first-key x", "Bearer first-ke"],
)
def test_without_the_right_key(locked: Live, value: str | None) -> None:
    headers = {} if value is None else {"authorization": value}
    with locked.http(headers=headers) as http:
        for method, path in (("GET", "/v1/models"), ("POST", COMPLETIONS), ("GET", "/metrics"), ("GET", "/nope")):
            reply = http.request(method, path)
            assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
            error = reply.json()["error"]
            assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
            assert "first" not in error["message"]
        for path in ("/version", "/openapi.json"):
            assert http.get(path).status_code == 401
        for path in ("/health", "/health/live", "/health/ready", "/ready", "/ping"):
            assert http.get(path).status_code == 200
            head = http.head(path)
            assert (head.status_code, head.content) == (200, b""), "as some load balancers ask"


@pytest.mark.parametrize("value", ["Bearer first-key", "bearer zweiter", "Bearer  zweiter"])
def test_with_a_right_key(locked: Live, value: str) -> None:
    with locked.http(headers={"authorization": value}) as http:
        assert http.get("/v1/models").status_code == 200


def test_the_openai_client_and_its_key(locked: Live) -> None:
    with locked.openai(api_key="first-key") as client:
        assert [model.id for model in client.models.list()] == ["tiny", "org/alias"]
    with locked.openai(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.parametrize(
    "wrong", [{"api_key": ("",)}, {"served_model_name": (" ",)}, {"port": 65536}, {"log_level": "x"}]
)
def test_options_out_of_bounds(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**wrong)


def too_large(reply: httpx.Response) -> None:
    assert reply.status_code == 413 and "2000 bytes" in reply.json()["error"]["message"]
    assert reply.headers["connection"] == "close"


def test_bodies_that_are_too_large(locked: Live) -> None:
    headers = {"authorization": "Bearer first-key", "content-type": "application/json"}
    with locked.http(headers=headers) as http:
        too_large(http.post(COMPLETIONS, content=b"x" * 2001))
        too_large(http.post(COMPLETIONS, content=(b"x" * 500 for _ in range(1000))))
        assert http.post(COMPLETIONS, content=b"x" * 2000).status_code == 400
        assert http.post(COMPLETIONS, content=(b"x" * 500 for _ in range(4))).status_code == 400


def test_compressed_bodies(live: Live) -> None:
    with live.http(headers={"content-type": "application/json"}) as http:
        body = gzip.compress(b'{"prompt": "x"}')
        for encoding, status in (("gzip", 415), ("br", 415), ("identity", 400)):
            assert http.post(COMPLETIONS, content=body, headers={"content-encoding": encoding}).status_code == status


def test_too_many_headers(live: Live) -> None:
    with live.http() as http:
        for headers in ({f"x-{number}": "v" for number in range(100)}, {"x-long": "v" * (33 << 10)}):
            reply = http.get("/health", headers=headers)
            assert reply.status_code == 431 and reply.json()["error"]["type"] == "invalid_request_error"


def test_request_ids(live: Live) -> None:
    with live.http() as http:
        made = {http.get("/health").headers["x-request-id"] for _ in range(3)}
        assert len(made) == 3
        for asked in ("abc", "A-1_2.3:4/5+6=@", "x" * 128):
            for path in ("/health", "/nope"):
                assert http.get(path, headers={"x-request-id": asked}).headers["x-request-id"] == asked
        for refused in ("", "a b", "x" * 129, 'a"b', "<a>"):
            given = http.get("/health", headers={"x-request-id": refused}).headers["x-request-id"]
            assert given != refused and len(given) == 32
        stream = http.post(COMPLETIONS, json={"prompt": "x", "stream": True}, headers={"x-request-id": "mine"})
        assert stream.headers["x-request-id"] == "mine"


def test_one_log_line_for_each_request(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    def ours() -> list[dict[str, Any]]:
        entries = [json.loads(record.getMessage()) for record in caplog.records if record.name == "rootgraft.access"]
        return [entry for entry in entries if entry["request_id"] == "r1"]

    with caplog.at_level(logging.INFO, logger="rootgraft.access"), live.http(headers={"x-request-id": "r1"}) as http:
        http.get("/health")
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a secret"}], "stream": True})
        http.get("/nope")
        wait_until(lambda: len(ours()) == 2)
    second, first = sorted(ours(), key=lambda entry: str(entry["path"]))
    assert first.items() >= {"status": 200, "model": "tiny", "stream": True, "n": 1}.items()
    assert first.items() >= {"completion_tokens": 8, "finished": {"stop": 1}}.items()
    assert first["seconds"] >= first["first_token_seconds"] > 0 and first["prompt_tokens"] == 2 * first["cached_tokens"]
    assert second.items() >= {"path": "/nope", "method": "GET", "status": 404}.items()
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (CapacityError("The queue is full."), 503, "server_overloaded"),
        (EngineDead("The engine process has ended."), 503, "engine_dead"),
        (DeadlineExceeded("The request had no token within its limit of 5 seconds."), 504, "timeout"),
        (EngineError("Something of ours."), 500, "internal_error"),
        (ValueError("a secret path"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine(live: Live, error: Exception, status: int, code: str, stream: bool) -> None:
    """Before the first token they have a status of their own, streamed or not; later they are an event."""
    body = {"prompt": "x", "stream": stream}
    live.async_engine.fail_after = (0, error)
    with live.http() as http:
        reply = http.post(COMPLETIONS, json=body)
        assert reply.status_code == status and "secret" not in reply.text
        assert reply.json()["error"].items() >= {"code": code, "type": "server_error", "param": None}.items()
        assert ("retry-after" in reply.headers) == (status == 503)
        live.async_engine.fail_after = (2, error)
        reply = http.post(COMPLETIONS, json=body)
    if not stream:
        assert reply.status_code == status
        return
    *events, last, empty = reply.text.split("\n\n")
    assert reply.status_code == 200 and len(events) == 2 and empty == "" and "[DONE]" not in reply.text
    assert json.loads(last.removeprefix("data: "))["error"].items() >= {"code": code, "type": "server_error"}.items()
    assert "secret" not in reply.text
    with live.openai() as client, pytest.raises(openai.APIError):
        list(client.completions.create(model="tiny", prompt="x", stream=True))


def test_a_bug_in_a_route_is_a_500_without_details(live: Live) -> None:
    live.async_engine.limits = None
    with live.http() as http:
        reply = http.post(COMPLETIONS, json={"prompt": "x"})
    assert reply.status_code == 500 and reply.headers["x-request-id"]
    assert reply.json()["error"]["code"] == "internal_error" and "NoneType" not in reply.text


def connect(live: Live) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=HANG_SECONDS)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Half: "])
def test_a_head_that_does_not_come(live: Live, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT", 0.05)
    with connect(live) as sock:
        sock.sendall(sent)
        assert read_all(sock) == b""


def test_a_head_without_end(live: Live) -> None:
    with connect(live) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        for _ in range(1000):
            sock.sendall(b"v" * 8192)
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ") and "longer than" in json.loads(body)["error"]["message"]


def test_a_body_that_does_not_come(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_TIMEOUT", 0.05)
    with connect(live) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt": '
        )
        reply = read_all(sock)
    assert b" 408 " in reply.partition(b"\r\n")[0] and b"did not arrive within" in reply


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nBad Header: y\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_no_http(live: Live, sent: bytes) -> None:
    with connect(live) as sock:
        sock.sendall(sent)
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert b"x-request-id: " in head
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == "invalid_http"


def test_two_requests_on_one_connection(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for a head ends with it: an answer may take longer, and the next request has its own."""
    made: list[connection.Connection] = []
    begin = connection.Connection.connection_made

    def noted(self: connection.Connection, transport: Any) -> None:
        begin(self, transport)
        made.append(self)

    monkeypatch.setattr(connection.Connection, "connection_made", noted)
    with connect(live) as sock:
        for _ in range(2):
            sock.sendall(b"GET /version HTTP/1.1\r\n")
            wait_until(lambda: bool(made) and made[0]._head_timer is not None)
            sock.sendall(b"Host: localhost\r\n\r\n")
            data = b""
            while b'"1.2.3"}' not in data:
                part = sock.recv(65536)
                assert part
                data += part
            assert data.startswith(b"HTTP/1.1 200") and made[0]._head_timer is None
    assert len(made) == 1


def test_a_path_in_the_host_header_changes_nothing(locked: Live) -> None:
    with connect(locked) as sock:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x/health?\r\nConnection: close\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 401")


def test_escaped_paths_are_guarded(locked: Live) -> None:
    for path in (
        "/v1/model%73",
        "//v1/models",
        "/health/../v1/models",
        "/health%2f..%2fv1/models",
        "/v1/models?/health",
    ):
        with connect(locked) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            assert read_all(sock).startswith(b"HTTP/1.1 401"), path


def test_lists_and_counts_of_tokens_crowd_out_no_recent_request(live: Live) -> None:
    """What generates nothing is neither shown nor counted, as the playground asks for tokens in a loop."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    quiet = [
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", chat),
        ("/detokenize", {"tokens": [97]}),
        ("/v1/messages/count_tokens", chat),
        ("/v1/responses/input_tokens", {"model": "tiny", "input": "hi"}),
    ]
    with live.http() as http:
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        before = http.get("/ui/state").json()["requests"]
        assert http.get("/v1/models").status_code == 200
        for path, body in quiet:
            assert http.post(path, json=body).status_code == 200, path
        after = http.get("/ui/state").json()["requests"]
        assert [after[name] for name in ("count", "failed", "last")] == [
            before[name] for name in ("count", "failed", "last")
        ]
        assert [each["requests"] for each in after["callers"]] == [each["requests"] for each in before["callers"]]
        assert http.get("/v1/models/nobody").status_code == 404
        assert http.post("/tokenize", json={"nothing": 1}).status_code == 400
        shown = http.get("/ui/state").json()["requests"]["last"][:3]
    assert [(each["path"], each["status"]) for each in shown] == [
        ("/tokenize", 400),
        ("/v1/models/nobody", 404),
        ("/v1/completions", 200),
    ]
