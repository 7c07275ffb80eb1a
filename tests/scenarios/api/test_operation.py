"""Probes, models, tokens, metrics and the OpenAPI document."""

from __future__ import annotations

import errno
import io
import logging
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from support.api.api_fakes import BOS
from support.api.api_live import Live, make_state, serve
from support.api.reply_checks import scrape, value

from rootgraft.api.config import ServerConfig
from rootgraft.api.observe.replica_view import GatewaysStatus
from rootgraft.engine.messages import Heartbeat

HI = [{"role": "user", "content": "hi"}]
DOCS = Path(__file__).parents[3] / "docs"


def statuses(live: Live) -> tuple[int, int, int]:
    with live.http() as http:
        return tuple(http.get(path).status_code for path in ("/health", "/ready", "/ping"))  # type: ignore


def test_probes(live: Live) -> None:
    assert statuses(live) == (200, 200, 200)
    live.state.engine.draining = True
    assert statuses(live) == (200, 503, 200)
    live.state.engine.draining = False
    live.client.hang()
    assert statuses(live) == (503, 503, 503)
    with live.http() as http:
        for path in ("/health", "/ready"):
            error = http.get(path).json()["error"]
            assert error["code"] == "engine_dead" and "no sign of life" in error["message"]
        assert "no sign of life" in http.post("/v1/completions", json={"prompt": "x"}).json()["error"]["message"]
    live.client.death = None
    assert statuses(live) == (503, 503, 503)


def test_a_server_is_ready_once_its_gateways_serve(live: Live) -> None:
    live.state.observers.gateways = lambda: GatewaysStatus((), 2, 0, serves=False)
    assert statuses(live) == (200, 503, 200)
    with live.http() as http:
        assert http.get("/ready").json()["error"]["code"] == "loading"
    live.state.observers.gateways = lambda: GatewaysStatus((), 2, 0)
    assert statuses(live) == (200, 200, 200)
    live.state.observers.gateways = None


def test_while_the_model_is_loading() -> None:
    state = make_state()
    state.engine.async_engine, state.engine.client = None, None
    for live in serve(state):
        assert statuses(live) == (503, 503, 503)
        with live.http() as http:
            assert "loading" in http.get("/health").json()["error"]["message"]
            reply = http.post("/v1/completions", json={"prompt": "x"})
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "server_overloaded"
            assert http.get("/v1/models").json() == {"object": "list", "data": []}  # its name is not known yet


def test_a_server_that_is_ending_takes_nothing_new(live: Live) -> None:
    live.state.engine.draining = True
    with live.openai() as client, pytest.raises(openai.InternalServerError, match="shutting down"):
        client.chat.completions.create(model="tiny", messages=HI)  # type: ignore[arg-type]
    assert not live.async_engine.seen


def test_a_dead_engine(live: Live) -> None:
    live.client.is_alive = False
    with live.http() as http:
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
            reply = http.post(path, json=body)
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_dead"


def test_models(live: Live) -> None:
    with live.openai() as client:
        listed = client.models.list().data
        assert [(model.id, model.object) for model in listed] == [("tiny", "model"), ("org/alias", "model")]
        assert client.models.retrieve("tiny") == listed[0]
        assert client.models.retrieve("org/alias").id == "org/alias"
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("gpt-9")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert listed[0].model_dump()["max_model_len"] == live.async_engine.max_model_len


def test_version(live: Live) -> None:
    with live.http() as http:
        assert http.get("/version").json() == {"version": "1.2.3"}


def test_tokenize_and_back(live: Live) -> None:
    with live.http() as http:
        answer = http.post("/tokenize", json={"model": "tiny", "prompt": "aé", "return_token_strs": True}).json()
        assert answer == {
            "count": 4,
            "max_model_len": live.async_engine.max_model_len,
            "tokens": [BOS, 97, 195, 169],
            "token_strs": [f"piece {token}" for token in (BOS, 97, 195, 169)],
        }
        assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "<s>aé"}
        plain = http.post("/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()
        assert (plain["tokens"], plain["token_strs"]) == ([97], None)
        assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == [BOS]
        assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_tokenize_messages_as_chat_does(live: Live) -> None:
    with live.http() as http:
        tokens = http.post("/tokenize", json={"messages": HI}).json()["tokens"]
        http.post("/v1/chat/completions", json={"messages": HI})
        assert tokens == list(live.async_engine.seen[0].tokens)
        open_ended = http.post("/tokenize", json={"messages": HI, "add_generation_prompt": False}).json()
    assert bytes(open_ended["tokens"]).decode() == "<user>hi\n"


def test_metrics_of_the_engine(live: Live) -> None:
    live.client.stats = {"running": 3.0, "waiting": 2.0, "pages": 100.0, "pages_available": 25.0, "prompt_tokens": 40.0}
    live.state.observers.metrics.on_heartbeat(Heartbeat({}, {"iteration_tokens_total": [2, 4], "unknown": [1.0]}))
    families = scrape(live)
    assert value(families, "num_requests_running", model_name="tiny", engine="0") == 3
    assert value(families, "num_requests_waiting") == 2
    assert value(families, "kv_cache_usage_perc") == 0.75
    assert value(families, "prompt_tokens", "_total") == 40
    assert value(families, "prefix_cache_queries", "_total") == 40
    assert value(families, "iteration_tokens_total", "_count") >= 2
    live.client.stats = {}
    assert value(scrape(live), "kv_cache_usage_perc") == 0


def test_metrics_of_requests(live: Live) -> None:
    before = scrape(live)
    with live.http() as http:
        http.post("/v1/completions", json={"prompt": ["ab", "c"], "n": 2})
        http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2})
        live.async_engine.fail_after = (1, ValueError("broken"))
        http.post("/v1/completions", json={"prompt": "ab", "n": 3})
    after = scrape(live)

    def grown(family: str, sample: str, **labels: str) -> float:
        return value(after, family, sample, **labels) - value(before, family, sample, **labels)

    assert grown("request_success", "_total", finished_reason="stop") == 4
    assert grown("request_success", "_total", finished_reason="length") == 1
    assert grown("request_success", "_total", finished_reason="error") == 3
    assert grown("request_success", "_total", finished_reason="abort") == 0
    assert grown("time_to_first_token_seconds", "_count") == 8
    assert grown("inter_token_latency_seconds", "_count") == 4 * 7 + 1
    assert grown("e2e_request_latency_seconds", "_count") == 5
    assert grown("request_generation_tokens", "_sum") == 4 * 8 + 2
    assert grown("request_prompt_tokens", "_sum") == 3 + 2 + 3 + 3
    assert grown("request_params_n", "_sum") == 2 + 2 + 1 + 3


def test_open_metrics_format(live: Live) -> None:
    with live.http(headers={"accept": "application/openmetrics-text; version=1.0.0"}) as http:
        reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("application/openmetrics-text") and reply.text.endswith("# EOF\n")


def test_the_page_of_metrics_is_complete(live: Live) -> None:
    """``docs/reference/metrics.md`` and a live /metrics have the same names, types and labels."""
    live.state.observers.metrics.count_fallback("overload", "other")  # its labels appear with its first value
    page = (DOCS / "reference" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\S+?)` \| (\w+) \|([^|]*)\|", page.partition("\n## ")[0], re.MULTILINE)
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    served = {}
    for family in scrape(live).values():
        if family.name.startswith("rootgraft:"):
            labels = set().union(*(sample.labels for sample in family.samples)) - {"model_name", "engine", "le"}
            name = family.name + ("_total" if family.type == "counter" else "")
            if name == "rootgraft:cache_config_info":  # has more of vLLM's labels than are worth telling
                labels &= documented[name][1]
            served[name] = (family.type, labels)
    assert documented == served


def test_the_openapi_document(live: Live) -> None:
    with live.http() as http:
        document = http.get("/openapi.json").json()
    assert document["info"] == {"title": "rootgraft", "version": "1.2.3"}
    paths = {path: set(methods) for path, methods in document["paths"].items()}
    assert paths == {
        "/v1/chat/completions": {"post"},
        "/v1/completions": {"post"},
        "/v1/responses": {"post"},
        "/v1/responses/input_tokens": {"post"},
        "/v1/responses/{response_id}": {"get", "delete"},
        "/v1/responses/{response_id}/cancel": {"post"},
        "/v1/responses/{response_id}/input_items": {"get"},
        "/v1/messages": {"post"},
        "/v1/decisions": {"post"},
        "/v1/systemone": {"post"},
        "/v1/score": {"post"},
        "/v1/embeddings": {"post"},
        "/v1/classify": {"post"},
        "/v1/rerank": {"post"},
        "/pooling": {"post"},
        "/score": {"post"},
        "/v1/messages/count_tokens": {"post"},
        "/v1/files": {"get", "post"},
        "/v1/files/{file_id}": {"get", "delete"},
        "/v1/files/{file_id}/content": {"get"},
        "/v1/batches": {"get", "post"},
        "/v1/batches/{batch_id}": {"get"},
        "/v1/batches/{batch_id}/cancel": {"post"},
        "/v1/models": {"get"},
        "/v1/models/{name}": {"get"},
        "/v1/adapters": {"get"},
        "/v1/fleet": {"get"},
        "/v1/cache": {"get"},
        "/v1/cache/reset": {"post"},
        **{f"/v1/cache/sessions/{verb}": {"post"} for verb in ("export", "import")},
        "/v1/sessions/release": {"post"},
        "/v1/load_lora_adapter": {"post"},
        "/v1/unload_lora_adapter": {"post"},
        "/tokenize": {"post"},
        "/detokenize": {"post"},
        "/tokenizer_info": {"get"},
        "/v1/admin/models": {"get", "post"},
        **{f"/v1/admin/models/{{name}}/{verb}": {"post"} for verb in ("canary", "promote", "remove", "rollback")},
        **{f"/api/{name}": {"post"} for name in ("chat", "embed", "embeddings", "generate", "show")},
        **{f"/api/{name}": {"get"} for name in ("ps", "tags", "version")},
        **{path: {"post"} for path in ("/generate", "/generate_stream", "/")},
        "/info": {"get"},
        **{f"/v2{path}": {"get"} for path in ("", "/health/live", "/health/ready", "/models/{name}")},
        "/v2/models/{name}/ready": {"get"},
        "/v2/models/{name}/infer": {"post"},
        "/v2/repository/index": {"post"},
        **{f"/v2/repository/models/{{name}}/{verb}": {"post"} for verb in ("load", "unload")},
        "/health": {"get"},
        "/health/live": {"get"},
        "/health/ready": {"get"},
        "/ready": {"get"},
        "/version": {"get"},
        "/metrics": {"get"},
        "/ui/state": {"get"},
    }
    schemas = document["components"]["schemas"]
    assert "422" not in str(document["paths"]) and "HTTPValidationError" not in schemas
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert {"temperature", "stream", "top_logprobs"} <= set(schemas["ChatRequest"]["properties"])


def test_web_pages_of_allowed_origins_may_ask(serve_with: Any) -> None:
    live = serve_with(ServerConfig(allowed_origins=("https://here.example",), api_key=("k",)))
    preflight = {"origin": "https://here.example", "access-control-request-method": "POST"}
    with live.http() as http:
        reply = http.options("/v1/chat/completions", headers=preflight)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://here.example"
        refused = http.get("/v1/models", headers={"origin": "https://here.example"})
        assert refused.status_code == 401 and refused.headers["x-request-id"]
        assert refused.headers["access-control-allow-origin"] == "https://here.example"
        exposed = refused.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens", "x-ratelimit-limit-requests"} <= set(
            exposed
        )
        assert http.options("/v1/models", headers={**preflight, "origin": "https://else.example"}).status_code == 400
        elsewhere = http.get("/health", headers={"origin": "https://else.example"})
        assert "access-control-allow-origin" not in elsewhere.headers


def test_no_web_page_may_ask_by_default(live: Live) -> None:
    with live.http() as http:
        reply = http.get("/v1/models", headers={"origin": "https://here.example"})
    assert "access-control-allow-origin" not in reply.headers and reply.headers["x-request-id"]


class FullDisk(io.StringIO):
    """A log file on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")


def test_a_full_disk_under_the_log_stops_nobody(live: Live) -> None:
    access, handler = logging.getLogger("rootgraft.access"), logging.StreamHandler(FullDisk())
    access.addHandler(handler)
    access.setLevel("INFO")
    try:
        with live.http() as http:
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
            assert http.get("/health").status_code == 200
    finally:
        access.removeHandler(handler)
        access.setLevel("NOTSET")
