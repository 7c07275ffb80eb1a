"""What is written down of requests: log lines, spans, ledger entries, counters of keys; and that they agree."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import sqlite3
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from support.api.api_live import Live
from support.api.key_files import entry, write
from support.api.reply_checks import scrape, value
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.api.observe.log import JsonLines, set_up_log
from rootgraft.api.observe.tracing import Tracer, open_tracer
from rootgraft.api.observe.usage_ledger import UsageLedger
from rootgraft.engine.errors import ConfigError, EngineDead

DOCS = Path(__file__).parents[3] / "docs"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "a secret"}]
Start = Callable[[ServerConfig], Live]


class Lines(logging.Handler):
    """What the log has as JSON, line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def log() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("rootgraft.access")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield handler
    logger.removeHandler(handler)
    logger.setLevel("NOTSET")


@pytest.fixture
def spans(live: Live) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    live.state.observers.tracer = Tracer(SimpleSpanProcessor(exporter), "1.2.3")
    yield exporter
    live.state.observers.tracer.close()
    live.state.observers.tracer = None


def test_a_line_of_the_log_tells_all_but_the_text(live: Live, log: Lines, spans: InMemorySpanExporter) -> None:
    with live.http() as http:
        reply = http.post(CHAT, json={"messages": HI, "n": 2, "max_tokens": 3}, headers={"x-request-id": "r1"})
    wait_until(lambda: bool(log.lines))
    [line] = log.lines
    assert (line["level"], line["logger"], line["request_id"], line["status"]) == (
        "info",
        "rootgraft.access",
        "r1",
        200,
    )
    assert (line["model"], line["adapter"], line["n"], line["stream"]) == ("tiny", None, 2, False)
    usage = reply.json()["usage"]
    told = [line[f"{kind}_tokens"] for kind in ("prompt", "completion", "cached")]
    assert told == [
        usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    ]  # fmt: skip
    assert line["finished"] == {"length": 2} and line["response_id"] == reply.json()["id"]
    assert line["seconds"] >= line["first_token_seconds"] > 0
    engine = ("queue_seconds", "prefill_seconds", "decode_seconds", "batch_size", "preemptions", "kv_pages")
    assert [line[name] for name in engine] == [0.25, 0.5, 2.0, 3.5, 2, 7 + 8]
    assert (line["tokens_per_second"], line["drafted_tokens"], "error" in line) == (2 * 2 / 2.0, 0, False)
    assert line["trace_id"] == f"{spans.get_finished_spans()[0].context.trace_id:032x}"
    assert "secret" not in str(log.lines)
    page = (DOCS / "guide" / "observability.md").read_text()
    assert all(f"`{name}`" in page for name in (*line, "key", "error"))


def test_a_line_of_the_log_tells_the_error(live: Live, log: Lines) -> None:
    with live.http() as http:
        http.post(CHAT, json={"messages": HI, "model": "nobody"})
        live.async_engine.fail_after = (1, EngineDead("The engine is not running."))
        http.post(CHAT, json={"messages": HI, "stream": True})
    wait_until(lambda: len(log.lines) == 2)
    refused, broken = log.lines
    assert (refused["status"], refused["error"]) == (404, "model_not_found")
    assert (broken["status"], broken["error"], broken["finished"]) == (200, "engine_dead", {"error": 1})
    assert "queue_seconds" not in broken, "what the engine measured came with no end"


def test_every_line_is_an_object_with_its_exception(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, root.handlers[:], level = root.handlers[:], [], root.level
    try:
        set_up_log("info", "json")
        try:
            raise ValueError("no\nway")
        except ValueError:
            logging.getLogger("x").exception("went %s", "wrong")
        set_up_log("info", "text")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    [line] = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert (found["message"], found["level"], found["logger"]) == ("went wrong", "error", "x")
    assert "ValueError" in found["exception"]


def test_spans_follow_the_conventions(live: Live, spans: InMemorySpanExporter) -> None:
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with live.http() as http:
        chat = http.post(CHAT, json={"messages": HI, "temperature": 0.5, "seed": 7}, headers=parent)
        http.post(COMPLETIONS, json={"prompt": "a secret", "stream": True, "n": 2})
        http.post(CHAT, json={"messages": HI, "response_format": {"type": "json_object"}})
        live.async_engine.fail_after = (1, EngineDead("The engine is not running."))
        http.post(CHAT, json={"messages": HI}, headers={"traceparent": "nonsense"})
    wait_until(lambda: len(spans.get_finished_spans()) == 4)
    first, second, third, failed = spans.get_finished_spans()
    assert (first.name, second.name) == ("chat tiny", "text_completion tiny")
    assert first.kind.name == "SERVER" and first.parent is not None
    assert (first.context.trace_id, first.parent.span_id) == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}
    for span in spans.get_finished_spans():
        assert span.attributes is not None and "secret" not in span.to_json()
        assert {name for name in span.attributes if name.startswith("gen_ai.")} <= known
        assert span.start_time is not None and span.end_time is not None and span.end_time >= span.start_time
        assert span.resource.attributes["service.name"] == "rootgraft"
    told, usage = first.attributes, chat.json()["usage"]
    assert told is not None and second.attributes is not None and third.attributes is not None
    assert told["gen_ai.response.id"] == chat.json()["id"] and told["gen_ai.request.model"] == "tiny"
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.seed"]) == (0.5, 7)
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert told["gen_ai.response.finish_reasons"] == ("stop",) and told["gen_ai.output.type"] == "text"
    assert second.attributes["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert second.attributes["gen_ai.request.stream"] is True and third.attributes["gen_ai.output.type"] == "json"
    assert failed.attributes is not None and failed.attributes["error.type"] == "error"
    assert failed.parent is None and not failed.status.is_ok


def test_spans_arrive_by_otlp(live: Live) -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        live.state.observers.tracer = open_tracer(f"http://127.0.0.1:{server.server_address[1]}/v1/traces", "1.2.3")
        with live.http() as http:
            assert http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200
        live.state.observers.tracer.close()
        live.state.observers.tracer = None
        server.shutdown()
        thread.join()
    [body] = bodies
    message = ExportTraceServiceRequest.FromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
    assert message.resource_spans[0].scope_spans[0].spans[0].name == "text_completion tiny"


def test_what_traces_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must be a URL"):
        open_tracer("localhost:4317", "1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"rootgraft\[otel\]"):
        open_tracer("http://localhost:4318/v1/traces", "1")


ASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 4}),
    (COMPLETIONS, {"prompt": ["ab", "c"], "n": 2}),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 0, "echo": True}),
    (CHAT, {"messages": HI, "n": 3}),
    (RESPONSES, {"input": "hi"}),
)


def used(reply: httpx.Response) -> tuple[int, int, int]:
    usage = reply.json()["usage"]
    if "input_tokens" in usage:
        cached = usage["input_tokens_details"]["cached_tokens"]
        return usage["input_tokens"], cached, usage["output_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


def test_the_ledger_and_the_counters_say_what_the_answers_said(tmp_path: Path, serve_with: Start) -> None:
    keys = tmp_path / "keys.json"
    write(keys, entry("a", scopes=["inference", "metrics"]), entry("b"))
    live = serve_with(ServerConfig(api_key_file=str(keys)))
    live.state.stores.ledger = UsageLedger(tmp_path / "usage.db")
    expected = {name: [0, 0, 0, 0] for name in "ab"}
    for name in ("a", "b", "a"):
        with live.http(headers={"authorization": f"Bearer {name}", "x-request-id": "always-the-same"}) as http:
            for path, body in ASKS:
                reply = http.post(path, json=body)
                db = sqlite3.connect(tmp_path / "usage.db")
                query = "SELECT requests, prompt_tokens, cached_tokens, completion_tokens FROM usage WHERE key = ?"
                [row] = db.execute(query, (name,)).fetchall()
                db.close()
                expected[name] = [old + new for old, new in zip(expected[name], (1, *used(reply)), strict=True)]
                assert list(row) == expected[name], "it is there when the answer is"
    families = scrape(live, authorization="Bearer a")
    names = ("key_requests", "key_prompt_tokens", "key_prompt_tokens_cached", "key_generation_tokens")
    for key, counts in expected.items():
        assert [value(families, name, "_total", key=key) for name in names] == counts
    asyncio.run_coroutine_threadsafe(live.state.stores.ledger.close(), live.loop).result(HANG_SECONDS)


def test_what_a_client_that_leaves_got_is_counted(tmp_path: Path, live: Live) -> None:
    class Gate:
        """Lets five frames through."""

        left = 5

        async def wait(self) -> None:
            self.left -= 1
            if self.left < 0:
                await asyncio.Event().wait()

    live.async_engine.gate = Gate()
    live.state.stores.ledger = UsageLedger(tmp_path / "usage.db")
    with live.http() as http, http.stream("POST", COMPLETIONS, json={"prompt": "abc", "stream": True}) as reply:
        next(reply.iter_lines())
    wait_until(lambda: bool(live.async_engine.aborted) and live.state.limits.active == 0)
    asyncio.run_coroutine_threadsafe(live.state.stores.ledger.close(), live.loop).result(HANG_SECONDS)
    live.state.stores.ledger = None
    db = sqlite3.connect(tmp_path / "usage.db")
    [(requests, prompt, completion)] = db.execute("SELECT requests, prompt_tokens, completion_tokens FROM usage")
    db.close()
    assert (requests, prompt) == (1, 4) and 1 <= completion <= 5


def test_the_expected_wait_is_told(live: Live) -> None:
    for band in ("realtime", "interactive", "batch"):
        assert value(scrape(live), "expected_queue_seconds", priority=band) == 0
    live.client.stats = {**live.client.stats, "queue_seconds_batch": 2.5}
    assert value(scrape(live), "expected_queue_seconds", priority="batch") == 2.5
    assert {"queue_seconds_realtime", "ledger_lost"} <= live.state.stats().keys()
