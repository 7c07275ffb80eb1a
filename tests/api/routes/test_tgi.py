"""The routes of Text Generation Inference as Hugging Face's client sees them, and as they are over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError
from support.api.api_live import Live
from support.api.messages_asks import say

from rootgraft.api.config import ServerConfig
from rootgraft.engine.errors import CapacityError, EngineDead
from rootgraft.engine.types import AdapterInfo

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture
def client(live: Live) -> InferenceClient:
    return InferenceClient(live.url)


def post(live: Live, status: int = 200, path: str = "/generate", **body: Any) -> Any:
    with live.http() as http:
        reply = http.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def same_request(live: Live, **fields: Any) -> None:
    """The last request of the engine is the one that a completion with these fields makes."""
    asked = live.async_engine.seen[-1]
    body = {"prompt": "hi", "max_tokens": 100, "temperature": 0, "include_stop_str_in_output": True, "logprobs": 0}
    with live.http() as http:
        assert http.post("/v1/completions", json={**body, **fields}).status_code == 200
    assert live.async_engine.seen[-1] == asked


def test_a_text(live: Live, client: InferenceClient) -> None:
    assert client.text_generation("hi") == "answer 0"
    same_request(live)
    assert client.text_generation("hi", return_full_text=True) == "hianswer 0"
    whole = client.text_generation("hi", details=True, max_new_tokens=3, seed=5, temperature=0.5, top_k=4, top_p=0.5)
    assert (whole.generated_text, whole.details.finish_reason, whole.details.generated_tokens) == ("ans", "length", 3)
    assert whole.details.seed == 5 and [each.text for each in whole.details.tokens] == ["a", "n", "s"]
    same_request(live, max_tokens=3, seed=5, temperature=0.5, top_k=4, top_p=0.5)


def test_a_stream(live: Live, client: InferenceClient) -> None:
    assert "".join(client.text_generation("hi", stream=True)) == "answer 0"
    parts = list(client.text_generation("hi", stream=True, details=True, top_n_tokens=2))
    assert "".join(part.token.text for part in parts) == "answer 0"
    assert [part.index for part in parts] == list(range(1, 9)) and parts[0].details is None
    assert all(len(part.top_tokens or ()) == 2 for part in parts)
    assert parts[-1].generated_text == "answer 0" and parts[-1].details
    assert (parts[-1].details.finish_reason, parts[-1].details.generated_tokens) == ("eos_token", 8)
    with live.http() as http:
        reply = http.post("/generate_stream", json={"inputs": "hi"})
    assert reply.headers["content-type"].startswith("text/event-stream") and reply.text.count("data:") == 8


@pytest.mark.parametrize("ends_apart", ["frame", "later"])
def test_the_end_is_no_token_of_its_own(live: Live, client: InferenceClient, ends_apart: str) -> None:
    """The engine tells the end of an answer after its last token, and a limit on tokens is no token."""
    live.async_engine.ends_apart = ends_apart
    whole = client.text_generation("hi", details=True, max_new_tokens=3, top_n_tokens=2)
    assert whole.details.generated_tokens == 3 and [each.text for each in whole.details.tokens] == ["a", "n", "s"]
    assert len(whole.details.top_tokens or ()) == 3
    parts = list(client.text_generation("hi", stream=True, details=True, max_new_tokens=3))
    assert "".join(part.token.text for part in parts) == parts[-1].generated_text == "ans"
    # An event that is sent cannot tell the end any more; the further one is marked as special.
    assert [part.token.special for part in parts] == [False] * 3 + [True] * (ends_apart == "later")
    assert parts[-1].details and parts[-1].details.finish_reason == "length"


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        ({"type": "json", "value": SCHEMA}, {"guided_json": SCHEMA}),
        ({"type": "json_schema", "value": {"name": "city", "schema": SCHEMA}}, {"guided_json": SCHEMA}),
        ({"type": "regex", "value": '\\{"city":"[A-Z][a-z]+"\\}'}, {"guided_regex": '\\{"city":"[A-Z][a-z]+"\\}'}),
    ],
)
def test_grammars(live: Live, client: InferenceClient, grammar: Any, field: Any) -> None:
    say(live, '{"city":"Ulm"}')
    assert json.loads(client.text_generation("hi", grammar=grammar)) == {"city": "Ulm"}
    assert "".join(client.text_generation("hi", grammar=grammar, stream=True)) == '{"city":"Ulm"}'
    same_request(live, include_stop_str_in_output=False, **field)


def test_adapters_and_stops(live: Live, client: InferenceClient) -> None:
    live.client.adapters["sql"] = AdapterInfo("sql", "adapters/sql", "ready", "host")
    whole = client.text_generation("hi", adapter_id="sql", stop=["x"], details=True)
    assert live.async_engine.seen[-1].adapter == "sql" and whole.details.finish_reason == "stop_sequence"
    same_request(live, model="sql", stop=["x"])


def test_a_prompt_is_cut_at_its_beginning(live: Live, client: InferenceClient) -> None:
    client.text_generation("abcdef", truncate=3)
    assert list(live.async_engine.seen[-1].tokens) == list(b"def")
    client.text_generation("hi", truncate=300)
    same_request(live)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"best_of": 2}, "parameters.best_of"),
        ({"watermark": True}, "parameters.watermark"),
        ({"typical_p": 0.5}, "parameters.typical_p"),
        ({"decoder_input_details": True}, "parameters.decoder_input_details"),
        ({"temperature": 0.0}, "parameters.temperature"),
        ({"temperature": 2.5}, "parameters.temperature"),
        ({"top_p": 1.5}, "parameters.top_p"),
        ({"max_new_tokens": 0}, "parameters.max_new_tokens"),
        ({"truncate": 0}, "parameters.truncate"),
        ({"warmth": 1}, "parameters.warmth"),
        ({"grammar": {"type": "regex", "value": 5}}, "parameters.grammar.value"),
        ({"grammar": {"type": "json_schema", "value": SCHEMA}}, "parameters.grammar.value"),
    ],
)
def test_what_is_not_done_is_refused_by_name(live: Live, fields: dict[str, Any], field: str) -> None:
    error = post(live, 422, inputs="hi", parameters=fields)
    assert error["error_type"] == "validation" and error["param"] == field and field in error["error"]
    assert not live.async_engine.seen
    neutral = {"best_of": 1, "watermark": False, "typical_p": 1.0, "decoder_input_details": False}
    assert post(live, inputs="hi", parameters=neutral) == {"generated_text": "answer 0"}


def test_errors(live: Live, client: InferenceClient) -> None:
    with pytest.raises(ValidationError, match="top_p"):
        client.text_generation("hi", top_p=1.5)
    assert post(live, 404, inputs="hi", parameters={"adapter_id": "nope"})["error_type"] == "validation"
    live.async_engine.fail_after = (0, CapacityError("The server is busy."))
    with pytest.raises(OverloadedError, match="busy"):
        client.text_generation("hi")
    live.async_engine.fail_after = (2, EngineDead("The engine process ended."))
    with live.http() as http:
        *_, last = http.post("/generate_stream", json={"inputs": "hi"}).text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"] == "The engine process ended."


def test_the_info(live: Live) -> None:
    with live.http() as http:
        assert http.get("/info").json()["max_total_tokens"] == 2048


def test_the_root_needs_a_key(serve_with: Any) -> None:
    live = serve_with(ServerConfig(api_key=("k",)))
    with live.http() as http:
        refused = http.post("/", json={"inputs": "hi"})
        assert refused.status_code == 401 and "API key" in refused.json()["error"]
        assert http.get("/health").status_code == 200
    assert InferenceClient(live.url, token="k").text_generation("hi") == "answer 0"
