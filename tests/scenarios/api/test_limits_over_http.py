"""Limits of keys and of the queue over HTTP: refusals, places, deadlines, and what the documents say of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api.api_live import Live, ask
from support.api.key_files import entry, write
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.api.errors import Rejection
from rootgraft.engine.types import Priority

COMPLETIONS = "/v1/completions"
Start = Callable[[ServerConfig], Live]


def key_file(folder: Path, *entries: dict[str, Any]) -> ServerConfig:
    write(folder / "keys.json", *entries)
    return ServerConfig(api_key_file=str(folder / "keys.json"), max_queued_requests=4)


def bearer(live: Live, name: str) -> httpx.Client:
    return live.http(headers={"authorization": f"Bearer {name}"})


def metric(live: Live, reason: str) -> float:
    labels = {"model_name": "tiny", "engine": "0", "reason": reason}
    value = live.state.observers.metrics.registry.get_sample_value("rootgraft:admission_rejections_total", labels)
    return float(value)


def check_refusal(reply: httpx.Response, status: int, kind: str, code: str) -> None:
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"], error["param"]) == (status, kind, code, None)
    assert int(reply.headers["retry-after"]) >= 1 and error["message"].endswith(".")


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_beyond_its_limits(tmp_path: Path, serve_with: Start, stream: bool) -> None:
    live = serve_with(key_file(tmp_path, entry("a", requests_per_minute=2), entry("b", tokens_per_minute=100)))
    body = {"prompt": "abcd", "max_tokens": 20, "stream": stream}
    with bearer(live, "a") as http:
        left = [http.post(COMPLETIONS, json=body).headers["x-ratelimit-remaining-requests"] for _ in range(2)]
        reply = http.post(COMPLETIONS, json=body)
    assert left == ["1", "0"]
    check_refusal(reply, 429, "requests", "rate_limit_exceeded")
    assert reply.headers["x-ratelimit-limit-requests"] == "2" and reply.headers["retry-after"] == "30"
    with bearer(live, "b") as http:
        # 5 tokens in the prompt, 8 in the answer: 12 are given back each time.
        left = [http.post(COMPLETIONS, json=body).headers["x-ratelimit-remaining-tokens"] for _ in range(6)]
        assert len(live.async_engine.seen) == 8
        reply = http.post(COMPLETIONS, json=body)
        check_refusal(reply, 429, "tokens", "rate_limit_exceeded")
        assert "x-ratelimit-limit-requests" not in reply.headers
    assert metric(live, "requests_per_minute") == metric(live, "tokens_per_minute") == 1


def ask_in_thread(http: httpx.Client, replies: list[httpx.Response], body: dict[str, Any]) -> threading.Thread:
    thread = threading.Thread(target=lambda: replies.append(http.post(COMPLETIONS, json=body)))
    thread.start()
    return thread


def test_a_queue_that_is_full(tmp_path: Path, serve_with: Start) -> None:
    """Places are held until first tokens, shared between tenants, and free again when the gate opens."""
    live = serve_with(key_file(tmp_path, entry("a"), entry("b"), entry("late", priority="batch")))
    live.async_engine.gate = asyncio.Event()
    replies: list[httpx.Response] = []
    with bearer(live, "a") as a, bearer(live, "b") as b, bearer(live, "late") as late:
        threads = [ask_in_thread(a, replies, {"prompt": "x", "n": 2})]
        wait_until(lambda: live.state.limits.admission.queue_limits.sequences == 2)
        check_refusal(a.post(COMPLETIONS, json={"prompt": "x"}), 429, "requests", "rate_limit_exceeded")
        check_refusal(late.post(COMPLETIONS, json={"prompt": "x"}), 503, "server_error", "server_overloaded")
        threads.append(ask_in_thread(b, replies, {"prompt": "x"}))
        wait_until(lambda: live.state.limits.admission.queue_limits.sequences == 3)
        check_refusal(b.post(COMPLETIONS, json={"prompt": ["x", "y"]}), 503, "server_error", "server_overloaded")
        live.loop.call_soon_threadsafe(live.async_engine.gate.set)
        for thread in threads:
            thread.join(HANG_SECONDS)
        assert [reply.status_code for reply in replies] == [200, 200]
        assert live.state.limits.admission.queue_limits.sequences == 0
        assert late.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200
    assert (metric(live, "tenant_share"), metric(live, "max_queued_requests")) == (1, 2)


def test_a_client_that_leaves_gives_its_place_back(tmp_path: Path, serve_with: Start) -> None:
    live = serve_with(key_file(tmp_path, entry("a", tokens_per_minute=1000)))
    live.async_engine.gate = asyncio.Event()
    with ask(live, COMPLETIONS, {"prompt": "x"}, key="a"):
        wait_until(lambda: live.state.limits.admission.queue_limits.sequences == 1)
    wait_until(lambda: live.state.limits.admission.queue_limits.sequences == 0)
    with bearer(live, "a") as http:
        wait_until(lambda: http.get("/version").headers["x-ratelimit-remaining-tokens"] == "1000")


def test_timeouts_of_header_and_option(live: Live, serve_with: Start) -> None:
    bounded = serve_with(ServerConfig(request_timeout=10.0))
    for server, asked, timeout in (
        (live, None, None),
        (live, "5", 5.0),
        (live, "0.25", 0.25),
        (live, "86400", 86400.0),
        (bounded, None, 10.0),
        (bounded, "5", 5.0),
        (bounded, "60", 10.0),
    ):
        with server.http(headers={} if asked is None else {"x-request-timeout": asked}) as http:
            assert http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200
        assert server.async_engine.seen[-1].timeout == timeout


SLOW = {
    "row_limit": 4,
    "rows_usable": 4,
    "running": 0,
    "waiting_deferred": 0,
    "waiting_deferred_tokens": 0,
    "prefill_tokens_per_second": 0.5,
    "prefill_pairs_per_second": 1e9,
    "prefilling_tokens": 0,
    "prefilling_pairs": 0,
    "prefill_short_tokens": 100,
    "engines": 1,
    "steps": 9,
}
"""Statistics of an engine that computes a token of a prompt in two seconds."""


def test_a_strict_request_is_refused_for_its_target_in_the_shape_of_its_protocol(live: Live) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    with live.http(headers={"x-slo": "strict"}) as http:
        reply = http.post(COMPLETIONS, json={"prompt": "x"})
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "no_target"
        live.state.limits.admission.queue_limits.target_ttft = {Priority.INTERACTIVE: 0.5}
        assert http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200
        live.client.stats |= SLOW
        for path, more in (("/v1/chat/completions", {}), ("/v1/messages", {"max_tokens": 4}), ("/api/chat", {})):
            reply = http.post(path, json={**asked, **more})
            error = reply.json()["error"]
            text = error if isinstance(error, str) else error["message"]
            assert (
                reply.status_code == (529 if path == "/v1/messages" else 503)
                and "first token is expected after" in text
                and "500 ms" in text
            )
            assert int(reply.headers["retry-after"]) >= 1
    assert metric(live, "target_ttft") == 3
    with live.http() as http:
        assert http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("value", ["", "Strict", "no", "1", "strict,strict"])
def test_a_header_x_slo_that_is_none(live: Live, value: str) -> None:
    with live.http(headers={"x-slo": value}) as http:
        reply = http.post(COMPLETIONS, json={"prompt": "x"})
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_header"


@pytest.mark.parametrize(
    "value", ["", "0", "0.0", "-1", "+1", "nan", "inf", "1e3", "86401", "9999999", "5s", "1,5", "1 2", "0x5", "."]
)
def test_timeouts_that_are_none(live: Live, value: str) -> None:
    with live.http(headers={"x-request-timeout": value}) as http:
        reply = http.post(COMPLETIONS, json={"prompt": "x"})
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_header"
    assert "86400" in reply.json()["error"]["message"] and not live.async_engine.seen


def test_the_document_says_what_the_code_does() -> None:
    """Every number of the table of limits, every reason, header, option and field of a key."""
    from rootgraft.api.access.api_keys import MAX_KEYS, KeyEntry
    from rootgraft.api.http.connection import DRAIN_BYTES, DRAIN_SECONDS, HEAD_TIMEOUT
    from rootgraft.api.http.guard import BODY_TIMEOUT, FILE_TIMEOUT, MAX_HEADER_BYTES, MAX_HEADERS
    from rootgraft.api.protocol.adapter_parts import MAX_MODEL_NAME
    from rootgraft.api.protocol.base import MAX_FORMAT_NAME, MAX_ID
    from rootgraft.api.protocol.chat_messages import MAX_MESSAGES, MAX_ROLE
    from rootgraft.api.protocol.completions import MAX_PROMPTS
    from rootgraft.api.protocol.kv_hints import MAX_ACTIONS, MAX_DIRECTIVES
    from rootgraft.api.protocol.responses import (
        MAX_METADATA,
        MAX_METADATA_KEY,
        MAX_METADATA_VALUE,
        MAX_SAFETY_IDENTIFIER,
        MAX_USER,
    )
    from rootgraft.api.protocol.tools import MAX_TOOLS
    from rootgraft.api.routes.files import MAX_LINES
    from rootgraft.engine.sampling_options import MAX_TOP_K
    from rootgraft.engine.scheduling.fairness import CACHED_WEIGHT
    from rootgraft.engine.scheduling.tenant_queue import MAX_OVERTAKEN, WINDOW
    from rootgraft.engine.serving.request import MAX_N, MAX_STOP_LENGTH, MAX_STOPS, MAX_TIMEOUT
    from rootgraft.engine.types import (
        MAX_LOGIT_BIAS,
        MAX_LOGPROBS,
        MAX_PIN_SECONDS,
        MAX_PREFIX_PINS,
        MAX_SEED,
        MAX_SESSION_NAME,
        MAX_STOP_TOKEN_IDS,
        MIN_SEED,
    )

    text = (Path(__file__).parents[3] / "docs" / "guide" / "keys-and-limits.md").read_text("utf-8")
    rows = dict(
        line.strip("| ").split(" | ", 1) for line in text.split("## Limits on input")[1].splitlines() if " | " in line
    )
    expected = {
        "body": [ServerConfig().max_request_bytes],
        "headers": [MAX_HEADERS, MAX_HEADER_BYTES],
        "time for the head of a request": [int(HEAD_TIMEOUT)],
        "time for its body": [int(BODY_TIMEOUT), int(FILE_TIMEOUT)],
        "what is received of a body after its answer": [int(DRAIN_SECONDS), DRAIN_BYTES],
        "a file of `/v1/files`": [ServerConfig().max_file_bytes, MAX_LINES],
        "`x-request-timeout`": [0, int(MAX_TIMEOUT)],
        "`model`, names of adapters": [MAX_MODEL_NAME],
        "`n`": [MAX_N],
        "prompts in a request": [MAX_PROMPTS],
        "messages in a request": [MAX_MESSAGES],
        "`stop`": [MAX_STOPS, MAX_STOP_LENGTH],
        "`stop_token_ids`": [MAX_STOP_TOKEN_IDS],
        "`logit_bias`": [MAX_LOGIT_BIAS, -100, 100],
        "`logprobs`, `top_logprobs`, `prompt_logprobs`": [MAX_LOGPROBS],
        "`top_k`": [MAX_TOP_K],
        "`seed`": [MIN_SEED, MAX_SEED],
        "`cache_salt`": [128],
        "`prompt_cache_key`, `session_id`": [MAX_SESSION_NAME],
        "`cache_control.ttl`": [1, int(MAX_PIN_SECONDS)],
        "`cache_control` in messages and tools": [MAX_PREFIX_PINS],
        "`kv_hints.retain_for`": [0, int(MAX_PIN_SECONDS)],
        "`kv_hints.actions`, directives in one": [MAX_ACTIONS, MAX_DIRECTIVES],
        "`role` of a message": [MAX_ROLE],
        "`tools`": [MAX_TOOLS],
        "ids and names in items of `/v1/responses`, `previous_response_id`": [MAX_ID],
        "`user` and `safety_identifier` of `/v1/responses`": [MAX_USER, MAX_SAFETY_IDENTIFIER],
        "name of a JSON schema as format": [MAX_FORMAT_NAME],
        "`metadata`": [MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE],
        "keys in a file": [MAX_KEYS],
    }
    del rows["what"]
    assert rows.keys() == expected.keys()
    for name, numbers in expected.items():
        assert all(str(number) in rows[name] for number in numbers), name
    text += (Path(__file__).parents[3] / "docs" / "guide" / "overload.md").read_text("utf-8")
    for word in (*Rejection.REASONS, *KeyEntry.model_fields, "x-ratelimit-remaining-requests", "x-request-timeout"):
        assert f"`{word}`" in text or f"{word} =" in text, word
    for name in ("api_key_file", "share_cache_between_keys", "max_queued_requests", "max_queued_tokens"):
        assert f"--{name.replace('_', '-')}" in text
    assert "--max-queue-seconds" in text and "--request-timeout" in text
    assert f"next {WINDOW} requests" in text and f"more than {MAX_OVERTAKEN}" in text and f"{CACHED_WEIGHT}" in text
