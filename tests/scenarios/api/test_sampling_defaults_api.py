"""Sampling defaults of the model over HTTP: every route applies them, and a request's own value wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.api.api_fakes import MAX_LEN
from support.api.api_live import Live

from rootgraft.api.cli.main import main
from rootgraft.engine.types import SamplingDefaults, SamplingParams

DEFAULTS = SamplingDefaults(0.6, 0.9, 40, 0.05, repetition_penalty=1.1, max_tokens=33)
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@pytest.fixture
def recommending(live: Live) -> Live:
    """A server whose model recommends values; the next test's server recommends none."""
    live.async_engine.defaults = DEFAULTS
    return live


def values(params: SamplingParams) -> list[float]:
    return [getattr(params, name) for name in NAMES]


@pytest.mark.parametrize("path", ASKED)
def test_requests_that_name_nothing_get_the_models(recommending: Live, path: str) -> None:
    with recommending.http() as http:
        nulls = dict.fromkeys(NAMES)
        assert [http.post(path, json={**ASKED[path], **more}).status_code for more in ({}, nulls)] == [200, 200]
    for request in recommending.async_engine.seen:
        assert values(request.params) == [0.6, 0.9, 40, 0.05, 1.1]
        assert request.params.max_tokens == (16 if path == "/v1/completions" else 33)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("given", [[0, 1, 0, 0, 1], [1, 0.5, -1, 0.2, 0.9]], ids=["neutral", "own"])
def test_a_requests_own_values_win(recommending: Live, path: str, given: list[float]) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**ASKED[path], **dict(zip(NAMES, given, strict=True)), limit: 50}
    with recommending.http() as http:
        assert http.post(path, json=body).status_code == 200
    [request] = recommending.async_engine.seen
    assert values(request.params) == [0 if value == -1 else value for value in given]
    assert request.params.max_tokens == 50


@pytest.mark.parametrize("path", ASKED)
def test_without_recommendations_the_defaults_are_openais(live: Live, path: str) -> None:
    with live.http() as http:
        assert http.post(path, json=ASKED[path]).status_code == 200
    [request] = live.async_engine.seen
    assert values(request.params) == [1.0, 1.0, 0, 0.0, 1.0]
    room = MAX_LEN - len(request.tokens)
    assert request.params.max_tokens == (16 if path == "/v1/completions" else room)


def test_an_answer_as_long_as_recommended_ends_where_the_context_does(recommending: Live) -> None:
    recommending.async_engine.defaults = SamplingDefaults(max_tokens=MAX_LEN)
    with recommending.http() as http:
        assert http.post("/v1/chat/completions", json=ASKED["/v1/chat/completions"]).status_code == 200
    [request] = recommending.async_engine.seen
    assert request.params.max_tokens == MAX_LEN - len(request.tokens)


def test_a_response_says_what_was_applied(recommending: Live) -> None:
    with recommending.http() as http:
        plain = http.post("/v1/responses", json={"input": "hi"}).json()
        own = http.post("/v1/responses", json={"input": "hi", "temperature": 0, "top_p": 1}).json()
        stored = http.get(f"/v1/responses/{plain['id']}").json()
    assert (plain["temperature"], plain["top_p"]) == (stored["temperature"], stored["top_p"]) == (0.6, 0.9)
    assert (own["temperature"], own["top_p"]) == (0, 1)


def test_a_batch_file_gets_them_too(recommending: Live, tmp_path: Path) -> None:
    lines = [
        json.dumps({"custom_id": path, "method": "POST", "url": path, "body": body}) for path, body in ASKED.items()
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main(["run-batch", *files, "--url", recommending.url]) == 0
    assert [values(request.params) for request in recommending.async_engine.seen] == [[0.6, 0.9, 40, 0.05, 1.1]] * 3
