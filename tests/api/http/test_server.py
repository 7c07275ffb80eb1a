"""The server process from start to end, in this process: a fake engine, real signals, a real port."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.api.real_server import free_port
from support.machine.server_process import Engine, Script, interrupt, replace_engine, run
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.api.http import server
from rootgraft.api.http.listener import listening
from rootgraft.api.models_file import ModelEntry, ServedModel
from rootgraft.api.rpc.messages import message
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import AdapterNotFound, ConfigError, EngineDead, ModelError


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    yield from replace_engine(monkeypatch)


def in_thread(http: httpx.Client, replies: list[Any], **body: Any) -> threading.Thread:
    """A request under way."""

    def ask() -> None:
        try:
            replies.append(http.post("/v1/completions", json={"prompt": "x", **body}))
        except httpx.HTTPError as error:
            replies.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_loading_serving_ending(engine: Engine) -> None:
    def steps(http: httpx.Client) -> None:
        assert http.get("/health").status_code == http.get("/ready").status_code == 503
        engine.loaded.set()
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert http.get("/v1/models").json()["data"][0]["id"] == "org/small"
        assert http.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]["text"] == "answer 0"
        assert 'model_name="org/small"' in http.get("/metrics").text
        interrupt()

    assert run(steps) == 0
    assert engine.closed
    assert engine.client.path == Path("model.gguf")


def test_grpc_beside_http(engine: Engine) -> None:
    port = free_port()
    ask, kind = "/rootgraft.v1.Generation/GenerateUnary", message("rootgraft.v1.GenerateResponse")
    request = message("rootgraft.v1.GenerateRequest")(prompt="x").SerializeToString()

    def steps(http: httpx.Client) -> None:
        wait_until(lambda: http.get("/health/live").status_code == 200)
        with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.enable_http_proxy", 0)]) as channel:
            call = channel.unary_unary(ask, response_deserializer=kind.FromString)
            with pytest.raises(grpc.RpcError) as caught:
                call(request, timeout=HANG_SECONDS, wait_for_ready=True)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, "the model is loading"
            engine.loaded.set()
            wait_until(lambda: http.get("/ready").status_code == 200)
            assert call(request, timeout=HANG_SECONDS).text == "answer 0"
        interrupt()

    assert run(steps, grpc_port=port) == 0


@pytest.mark.parametrize("mode", ["auto", "vllm"])
def test_the_first_lines_tell_the_models_sampling_defaults(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    caplog.set_level(logging.INFO)
    engine.model = tmp_path
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "top_k": -7}')

    def steps(http: httpx.Client) -> None:
        engine.loaded.set()
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert http.post("/v1/completions", json={"prompt": "x", "top_p": 1}).status_code == 200
        interrupt()

    assert run(steps, engine=EngineConfig(model="m", generation_config=mode)) == 0
    [request] = engine.async_engine.seen
    lines = caplog.messages
    assert (request.params.temperature, request.params.top_p) == (0.6 if mode == "auto" else 1, 1)
    applied = (
        "sampling defaults of generation_config.json: temperature 0.6, top_p 0.9 (--generation-config vllm turns "
        "them off)"
    )
    assert (applied in lines) == (mode == "auto")
    ignored = "generation_config.json: ignored: top_k must be at least 0 and at most 1048576, not -7."
    assert (ignored in lines) == (mode == "auto")


def test_names_of_the_operators(engine: Engine) -> None:
    engine.loaded.set()

    def steps(http: httpx.Client) -> None:
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["a", "b"]
        interrupt()

    assert run(steps, served_model_name=("a", "b")) == 0


def test_draining_finishes_what_runs_and_takes_nothing_new(engine: Engine) -> None:
    engine.loaded.set()
    engine.async_engine.gate = gate = asyncio.Event()
    replies: list[Any] = []

    def steps(http: httpx.Client) -> None:
        wait_until(lambda: http.get("/ready").status_code == 200)
        running = in_thread(http, replies)
        wait_until(lambda: bool(engine.async_engine.seen))
        interrupt()
        wait_until(lambda: http.get("/ready").status_code == 503)
        assert http.get("/health").json()["status"] == "draining"
        refused = http.post("/v1/completions", json={"prompt": "y"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
        assert not replies and not engine.closed
        gate.set()
        running.join(HANG_SECONDS)

    assert run(steps) == 0
    assert [reply.json()["choices"][0]["text"] for reply in replies] == ["answer 0"]
    assert len(engine.async_engine.seen) == 1 and engine.closed


def test_a_terminal_that_is_closed_lets_what_runs_finish(engine: Engine) -> None:
    """The system and the shell may both tell of it: the second one cuts off nothing."""
    engine.loaded.set()
    engine.async_engine.gate = gate = asyncio.Event()
    replies: list[Any] = []

    def steps(http: httpx.Client) -> None:
        wait_until(lambda: http.get("/ready").status_code == 200)
        running = in_thread(http, replies)
        wait_until(lambda: bool(engine.async_engine.seen))
        for _ in range(2):
            interrupt(signal.SIGHUP)
            wait_until(lambda: http.get("/ready").status_code == 503)
        assert http.get("/health").json()["status"] == "draining"
        gate.set()
        running.join(HANG_SECONDS)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup these tests inherit that it is ignored
    try:
        assert run(steps) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [reply.json()["choices"][0]["text"] for reply in replies] == ["answer 0"]


def test_nohup_is_respected(engine: Engine) -> None:
    engine.loaded.set()

    def steps(http: httpx.Client) -> None:
        wait_until(lambda: http.get("/ready").status_code == 200)
        interrupt(signal.SIGHUP)
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        interrupt()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(steps) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_models_file_is_read_again_after_a_signal_while_its_models_load(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    entry = ModelEntry("models[0]", {"model": "m"})
    model = ServedModel(entry, EngineConfig(model="m"), ServerConfig(port=port))
    reads: list[bool] = []

    def read_again() -> list[ServedModel]:
        reads.append(engine.loaded.is_set())
        raise ConfigError("It holds a mistake.")

    def steps(http: httpx.Client) -> None:
        wait_until(lambda: engine.client is not None)
        interrupt(signal.SIGHUP)
        assert http.get("/ready").status_code == 503 and not reads
        engine.loaded.set()
        wait_until(lambda: reads == [True])
        interrupt(signal.SIGHUP)
        wait_until(lambda: reads == [True, True])
        assert http.get("/ready").status_code == 200
        interrupt()

    script = Script(steps, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_SECONDS, trust_env=False))
    try:
        with caplog.at_level("ERROR", "rootgraft.server"):
            assert server.serve_models([model], read_again) == 0
    finally:
        script.finish()
    assert caplog.text.count("the models are not changed: It holds a mistake.") == 2


def test_draining_finishes_a_response_that_nobody_waits_for(engine: Engine) -> None:
    engine.loaded.set()
    engine.async_engine.gate = gate = asyncio.Event()

    def steps(http: httpx.Client) -> None:
        wait_until(lambda: http.get("/ready").status_code == 200)
        begun = http.post("/v1/responses", json={"input": "hi", "background": True}).json()
        wait_until(lambda: bool(engine.async_engine.seen))
        interrupt()
        wait_until(lambda: http.get("/ready").status_code == 503)
        assert http.get(f"/v1/responses/{begun['id']}").json()["status"] == "queued" and not engine.closed
        gate.set()

    assert run(steps) == 0
    assert len(engine.async_engine.seen) == 1 and not engine.async_engine.aborted and engine.closed


def test_what_is_used_is_in_the_ledger_when_the_server_ends(engine: Engine, tmp_path: Path) -> None:
    engine.loaded.set()
    file = tmp_path / "usage.db"

    def steps(http: httpx.Client) -> None:
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        engine.async_engine.fail_after = (0, AdapterNotFound("It is in no folder."))
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 404
        interrupt()

    assert run(steps, usage_ledger=str(file)) == 0
    db = sqlite3.connect(file)
    assert db.execute("SELECT key, model, requests FROM usage").fetchall() == [("", "org/small", 1)]
    db.close()
    assert not file.with_name("usage.db-wal").exists()


def test_a_ledger_or_traces_that_cannot_be(engine: Engine, tmp_path: Path) -> None:
    for options, flag in (
        ({"usage_ledger": str(tmp_path / "none" / "usage.db")}, "usage-ledger"),
        ({"otlp_traces_endpoint": "localhost"}, "otlp-traces-endpoint"),
    ):
        with pytest.raises(ConfigError, match=flag):
            server.serve(EngineConfig(), ServerConfig(port=0, **options))
    assert engine.client is None


@pytest.mark.parametrize("how", ["time is up", "second signal"])
def test_what_does_not_finish_gets_an_error(engine: Engine, how: str, caplog: pytest.LogCaptureFixture) -> None:
    engine.loaded.set()
    engine.async_engine.gate = asyncio.Event()
    replies: list[Any] = []

    def steps(http: httpx.Client) -> None:
        wait_until(lambda: http.get("/ready").status_code == 200)
        running = in_thread(http, replies)
        wait_until(lambda: bool(engine.async_engine.seen))
        interrupt()
        if how == "second signal":
            wait_until(lambda: http.get("/ready").status_code == 503)
            interrupt()
        running.join(HANG_SECONDS)

    timeout = 0.25 if how == "time is up" else 600
    with caplog.at_level(logging.INFO, logger="rootgraft.server"):
        assert run(steps, shutdown_timeout=timeout) == server.EXIT_CUT_OFF == 1
    assert f"finishing 1 request, for at most {timeout:g} s; a second signal aborts them" in caplog.messages
    assert "cutting off 1 request" in caplog.messages
    [reply] = replies
    assert isinstance(reply, httpx.HTTPError) or reply.json()["error"]["code"] == "engine_dead"
    assert engine.closed


@pytest.mark.parametrize("how", ["gone", "hanging"])
def test_a_dead_engine_ends_the_process_with_70(engine: Engine, how: str, caplog: pytest.LogCaptureFixture) -> None:
    engine.loaded.set()

    def steps(http: httpx.Client) -> None:
        wait_until(lambda: http.get("/ready").status_code == 200)
        if how == "gone":
            engine.client.is_alive = False
        else:
            engine.client.hang()

    with caplog.at_level(logging.ERROR, logger="rootgraft.server"):
        assert run(steps, heartbeat_timeout=7.5, watchdog_timeout=42) == server.EXIT_ENGINE_DEAD == 70
    assert engine.closed and engine.client.killed
    assert engine.client.watched == {"heartbeat_timeout": 7.5, "watchdog_timeout": 42, "spawn": None}
    assert ("no sign of life" if how == "hanging" else "not running") in caplog.text


def test_an_engine_that_is_killed_while_the_server_drains_ends_it_with_70(engine: Engine) -> None:
    engine.loaded.set()
    engine.async_engine.gate = asyncio.Event()
    replies: list[Any] = []

    def steps(http: httpx.Client) -> None:
        wait_until(lambda: http.get("/ready").status_code == 200)
        running = in_thread(http, replies)
        wait_until(lambda: bool(engine.async_engine.seen))
        interrupt()
        wait_until(lambda: http.get("/ready").status_code == 503)
        engine.client.is_alive = False
        engine.client.on_death(EngineDead("The engine process has ended."))
        running.join(HANG_SECONDS)

    assert run(steps) == server.EXIT_ENGINE_DEAD
    assert [reply.json()["error"]["code"] for reply in replies] == ["engine_dead"]
    assert engine.closed


def test_a_signal_while_the_model_is_loading(engine: Engine) -> None:
    def steps(http: httpx.Client) -> None:
        wait_until(lambda: engine.client is not None)
        interrupt()

    assert run(steps) == 0
    assert engine.closed


def test_a_model_that_cannot_be_loaded(engine: Engine) -> None:
    engine.start_error = ModelError("This architecture is not supported.")

    def steps(http: httpx.Client) -> None:
        engine.loaded.set()

    with pytest.raises(ModelError, match="architecture"):
        run(steps)
    assert engine.closed


def test_a_port_that_is_taken(engine: Engine) -> None:
    with listening(ServerConfig(port=0)) as listener:
        port = listener.socket.getsockname()[1]
        fault = (
            rf"Cannot listen on 127\.0\.0\.1, port {port}: in use.* \(pid {os.getpid()}\)\. Try: rootgraft serve --port"
        )
        with pytest.raises(ConfigError, match=fault) as refusal:
            server.serve(EngineConfig(), ServerConfig(port=port))
        with listening(ServerConfig(port=int(str(refusal.value).split()[-1]))):
            pass
    with pytest.raises(ConfigError, match="Cannot listen"):
        server.serve(EngineConfig(), ServerConfig(host="no.such.host.invalid"))
    assert engine.client is None


def test_keys_that_cannot_be_read(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api-key-file"):
        server.serve(EngineConfig(), ServerConfig(port=0, api_key_file=str(tmp_path / "none")))
