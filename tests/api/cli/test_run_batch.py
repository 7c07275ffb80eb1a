"""``rootgraft run-batch``: every request is answered once, whatever breaks off in between."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.api.api_live import Live
from support.machine.thoroughness import repeats

from rootgraft.api.cli import remote_server
from rootgraft.api.cli.main import main
from rootgraft.engine.types import Priority
from rootgraft.grammar.spec import GrammarSpec

CHAT = "/v1/chat/completions"


def line(number: int, url: str = CHAT, **body: Any) -> str:
    asked = {"messages": [{"role": "user", "content": str(number)}]} if url == CHAT else {}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": asked | body})


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def answers(path: Path) -> dict[str, Any]:
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines), "an answer appears twice"
    return found


def run(live: Live, given: Path, out: Path, *more: str) -> int:
    return main(["run-batch", "-i", str(given), "-o", str(out), "--url", live.url, *more])


def test_all_endpoints_in_the_batch_band(live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    given = write(
        tmp_path / "in.jsonl",
        line(0),
        "",
        line(1, "/v1/completions", prompt="x", model="org/alias", priority="interactive"),
        line(2, "/v1/responses", input="x"),
    )
    assert run(live, given, out) == 0
    found = answers(out)
    assert found["r0"]["response"]["body"]["choices"][0]["message"]["content"] == "answer 0"
    assert found["r1"]["response"]["body"]["model"] == "org/alias"
    assert found["r2"]["response"]["body"]["status"] == "completed"
    assert all(each["error"] is None and each["id"].startswith("batch_req_") for each in found.values())
    assert found["r0"]["response"]["request_id"]
    assert sorted(request.priority for request in live.async_engine.seen) == [
        Priority.INTERACTIVE,
        *[Priority.BATCH] * 2,
    ]
    assert capsys.readouterr().out == "3 requests: 3 answered in this run, 0 in earlier runs; 0 failed\n"


def test_integers_beyond_64_bits_are_exact_in_schemas(live: Live, tmp_path: Path) -> None:
    schema = {"type": "integer", "minimum": 2**64 + 1}
    live.async_engine.say = lambda request, index: "18446744073709551617"
    assert run(live, write(tmp_path / "in.jsonl", line(0, guided_json=schema)), tmp_path / "out.jsonl") == 0
    assert live.async_engine.seen[-1].grammar == GrammarSpec.json_schema(schema)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_a_bar_that_counts_what_was_done_before(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out = write(tmp_path / "in", *map(line, range(4))), tmp_path / "out"
    assert run(live, write(tmp_path / "first", line(0)), out) == 0
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert run(live, given, out) == 0
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "1/4" in shown and "4/4" in shown and "0/4" not in shown


def test_a_refused_request_is_an_answer_too(live: Live, tmp_path: Path) -> None:
    given, out = write(tmp_path / "in", line(0), line(1, max_tokens=-1)), tmp_path / "out"
    assert run(live, given, out) == 1
    refused = answers(out)["r1"]["response"]
    assert refused["status_code"] == 400 and refused["body"]["error"]["param"] == "max_tokens"


@settings(max_examples=repeats(12), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(cut=st.floats(0, 1), concurrency=st.integers(1, 5))
def test_it_goes_on_where_it_was_cut_off(cut: float, concurrency: int, live: Live, tmp_path: Path) -> None:
    live.reset()
    given, out = write(tmp_path / "in", *map(line, range(6))), tmp_path / "out"
    out.unlink(missing_ok=True)
    assert run(live, given, out) == 0
    whole = out.read_bytes()
    kept = whole[: int(cut * len(whole))]
    out.write_bytes(kept)
    assert run(live, given, out, "--max-concurrency", str(concurrency)) == 0
    assert answers(out).keys() == {f"r{number}" for number in range(6)}
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert len(live.async_engine.seen) == 12 - kept.count(b"\n")


def test_a_server_that_has_no_room_is_asked_again(live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep

    async def room(seconds: float) -> None:
        live.state.engine.draining = False
        await sleep(0)  # it is everybody's: the server's loop must get its turn

    monkeypatch.setattr("rootgraft.api.batches.batch_work.asyncio.sleep", room)
    live.state.engine.draining = True
    given, out = write(tmp_path / "in", line(0)), tmp_path / "out"
    assert run(live, given, out) == 0
    assert answers(out)["r0"]["response"]["status_code"] == 200


class Stopped(BaseHTTPRequestHandler):
    """A server that names its model, is healthy once, and then answers no more."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.asked.count("/health") > 1:
            return self.do_POST()
        if self.path == "/health":  # the first, which a busy machine may answer late
            remote_server._HEALTH_TIMEOUT = 0.5
        body = json.dumps({"data": [{"id": "tiny"}]}).encode()
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def do_POST(self) -> None:
        self.connection.recv(1 << 20)  # the end of the client's connection
        while self.connection.recv(1 << 20):
            pass

    def log_message(self, *_: Any) -> None:
        pass


def test_a_server_that_answers_no_more_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote_server, "_HEALTH_SECONDS", 0.01)
    monkeypatch.setattr(remote_server, "_HEALTH_TIMEOUT", 60.0)
    Stopped.asked.clear()
    given, out = write(tmp_path / "in", *map(line, range(4))), tmp_path / "out"
    with ThreadingHTTPServer(("127.0.0.1", 0), Stopped) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"127.0.0.1:{server.server_port}"
            assert main(["run-batch", "-i", str(given), "-o", str(out), "--url", address]) == 1
        finally:
            server.shutdown()
            thread.join()
    assert Stopped.asked == ["/v1/models", "/health", "/health"]
    assert "no longer responds" in capsys.readouterr().err and out.read_bytes() == b""


def test_a_server_that_is_not_there(tmp_path: Path, closed_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    given, out = write(tmp_path / "in", line(0), line(1)), tmp_path / "out"
    assert main(["run-batch", "-i", str(given), "-o", str(out), "--url", f"127.0.0.1:{closed_port}"]) == 1
    assert "No server responds" in capsys.readouterr().err and out.read_bytes() == b""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["[]"], "in, line 1: is not a JSON object."),
        ([line(0), "{"], "in, line 2: is not a JSON object."),
        (['{"custom_id": "a"}'], "in, line 1: 'body' is missing."),
        ([line(0), line(0)], "in, line 2: custom_id 'r0' is used twice."),
        ([line(0).replace("POST", "GET")], "in, line 1: method must be POST"),
        ([line(0, "/v1/moderations")], "in, line 1: method must be POST and url one of"),
        ([line(0, stream=True)], "in, line 1: body must be"),
        ([line(0).replace('"r0"', "7")], "in, line 1: custom_id must be"),
    ],
)
def test_a_wrong_input_is_refused_before_anything_is_asked(
    lines: list[str], message: str, live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out = write(tmp_path / "in", *lines), tmp_path / "out"
    assert run(live, given, out) == 1
    assert message in capsys.readouterr().err
    assert not out.exists() and not live.async_engine.seen


def test_files_that_are_none(live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, out = write(tmp_path / "in", line(0)), tmp_path / "out"
    assert run(live, tmp_path / "none", out) == 1
    write(out, "not an answer of ours")
    assert run(live, given, out) == 1
    assert "line 1: not an answer; the file is left unchanged" in capsys.readouterr().err
    assert out.read_text() == "not an answer of ours\n"
    for content in (line(0), "x", '{"id": "batch_req_1"'):
        out.write_text(content)
        assert run(live, given, out) == 1 and out.read_text() == content, "it is no answer that was cut off"
    given.write_text(line(0))
    assert run(live, given, given) == 1 and given.read_text() == line(0)
    assert "is the input" in capsys.readouterr().err
    assert main(["run-batch", "-i", str(given)]) == 2
    assert run(live, given, out, "--dtype", "float32") == 1
    assert "engine options cannot be used with it" in capsys.readouterr().err


@pytest.mark.heavy
def test_an_engine_of_its_own(tmp_path: Path) -> None:
    given, out = write(tmp_path / "in", *(line(number, max_tokens=8) for number in range(5))), tmp_path / "out"
    assert main(["run-batch", "-i", str(given), "-o", str(out), "--max-model-len", "512"]) == 0
    assert len(answers(out)) == 5
