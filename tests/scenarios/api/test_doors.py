"""Doors of other protocols: both sides of each number's limit, unknown fields by name, errors in their own shape."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from support.api.api_live import Live
from support.api.rpc_live import GENERATION, generate_request, rpc_of
from support.api.socket_asks import hear_ends, socket_of, tell

from rootgraft.engine.errors import EngineDead

HI = [{"role": "user", "content": "hi"}]
MOST_SEED, MOST_TOP_K = 2**63 - 1, 1 << 20
MOST_TOKENS, MOST_UINT = 2**63 - 1, 2**64 - 1
MOST_CHARS = "x" * 256


def chat(**options: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HI, "stream": False, "options": {"num_predict": 4, **options}}


def prompt(**options: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", "stream": False, "options": {"num_predict": 4, **options}}


def tgi(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "hi", "parameters": {"max_new_tokens": 4, **parameters}}


def infer(**parameters: Any) -> dict[str, Any]:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}
    return {"inputs": [tensor], "parameters": {"max_tokens": 4, **parameters}}


DOORS: dict[str, Any] = {
    "/api/chat": chat,
    "/api/generate": prompt,
    "/generate": tgi,
    "/v2/models/tiny/infer": infer,
}
ABOVE = 1.0000001
SHARED: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0.01, 2], [-0.01, 2.01, 1e308]),
    "top_k": ([1, MOST_TOP_K], [-2, MOST_TOP_K + 1, 2**70]),
    "top_p": ([0.01, 1], [0, -0.1, ABOVE, 1e308]),
    "seed": ([0, MOST_SEED], [MOST_SEED + 1, 2**70]),
    "frequency_penalty": ([-2, 2], [-2.01, 2.01, 1e308]),
}
OLLAMA = {
    "num_predict": ([-2, 1, MOST_TOKENS], [-3, 1.5, MOST_TOKENS + 1, 2**70]),
    "min_p": ([0, 1], [-0.01, ABOVE]),
    "presence_penalty": ([-2, 2], [-2.01, 2.01]),
    "repeat_penalty": ([0.01, 2], [0, 2.01, 1e308]),
    "repeat_last_n": ([-1, 0, MOST_TOKENS], [-2, MOST_TOKENS + 1, 2**70]),
}
LIMITS: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {
    "/api/chat": OLLAMA,
    "/api/generate": OLLAMA,
    "/generate": {
        "max_new_tokens": ([1, MOST_TOKENS], [0, -1, 1.5, MOST_TOKENS + 1, 2**70]),
        "repetition_penalty": ([0.01, 2], [0, 2.01]),
        "seed": ([0], [-1]),
        "temperature": ([0.01], [0]),
        "top_k": ([1], [0]),
        "top_n_tokens": ([0, 20], [-1, 21, 2**70]),
        "truncate": ([1, MOST_TOKENS], [0, -1, MOST_TOKENS + 1, 2**70]),
    },
    "/v2/models/tiny/infer": {
        "max_tokens": ([1, MOST_TOKENS], [-1, 1.5, MOST_TOKENS + 1, 2**70]),
        "min_tokens": ([0, 4], [-1, 2**70]),
        "presence_penalty": ([-2, 2], [-2.01, 2.01]),
        "priority": ([0, MOST_UINT, "batch"], [-1, 1.5, MOST_UINT + 1, True, "high"]),
        "repetition_penalty": ([0.01, 2], [0, 2.01]),
        "sequence_end": ([True], [1]),
        "sequence_id": ([0, MOST_UINT, MOST_CHARS], [-1, 1.5, MOST_UINT + 1, MOST_CHARS + "x"]),
        "sequence_start": ([True], [1]),
        "timeout": ([0, MOST_UINT], [-1, 1.5, MOST_UINT + 1, "1"]),
    },
}
CASES = [
    (path, name, *values) for path in DOORS for limits in (SHARED, LIMITS[path]) for name, values in limits.items()
]


def check_error(path: str, reply: Any, param: str, code: str | None = None) -> None:
    """That an error has its protocol's shape, and names the field."""
    assert reply.status_code == (422 if path == "/generate" else 400), reply.text
    told = reply.json()
    assert isinstance(told["error"], str) and param in told["error"] and told["param"].endswith(param), told
    assert code is None or told["code"] == code
    assert path != "/generate" or told["error_type"] == "validation"


@pytest.mark.parametrize(("path", "name", "good", "bad"), CASES)
def test_numbers_on_both_sides_of_their_limits(
    live: Live, path: str, name: str, good: list[Any], bad: list[Any]
) -> None:
    with live.http() as http:
        for value in good:
            reply = http.post(path, json=DOORS[path](**{name: value}))
            assert reply.status_code == 200, (value, reply.text)
        for value in bad:
            check_error(path, http.post(path, json=DOORS[path](**{name: value})), name)


@pytest.mark.parametrize("path", DOORS)
def test_unknown_fields_are_refused_by_name(live: Live, path: str) -> None:
    with live.http() as http:
        check_error(path, http.post(path, json=DOORS[path](no_such=1)), "no_such", "unknown_parameter")
        check_error(path, http.post(path, json=DOORS[path]() | {"nor_this": 1}), "nor_this", "unknown_parameter")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/api/chat", chat() | {"model": "x" * 257}, "model"),
        ("/api/chat", chat(stop=["x" * 257]), "stop"),
        ("/api/embed", {"model": "tiny", "input": "a", "dimensions": 65_537}, "dimensions"),
        ("/api/show", {"model": "x" * 257}, "model"),
        ("/generate", tgi(stop=["x" * 257]), "stop"),
        ("/generate", tgi(stop=["x"] * 129), "stop"),
        ("/generate", tgi(adapter_id="x" * 257), "adapter_id"),
        ("/generate", tgi(grammar={"type": "regex", "value": "a" * 65_537}), "grammar"),
        ("/v2/models/tiny/infer", infer() | {"id": "x" * 257}, "id"),
        ("/v2/models/tiny/infer", infer() | {"inputs": infer()["inputs"] * 17}, "inputs"),
        ("/v2/repository/index", {"ready": "x"}, "ready"),
        ("/v2/repository/models/x/load", {"no_such": 1}, "no_such"),
    ],
)
def test_texts_and_lists_beyond_their_lengths(live: Live, path: str, body: dict[str, Any], param: str) -> None:
    with live.http() as http:
        check_error(path, http.post(path, content=json.dumps(body)), param)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/none", 404),
        ("GET", "/v2/models/none/ready", 404),
        ("POST", "/v2/models/none/infer", 404),
        ("GET", "/v2/models/tiny/infer", 405),
        ("GET", "/v2/models/tiny/no/such", 404),
        ("GET", "/api/chat", 405),
        ("POST", "/api/no-such", 404),
        ("GET", "/generate", 405),
    ],
)
def test_errors_without_a_field_are_texts_too(live: Live, method: str, path: str, status: int) -> None:
    with live.http() as http:
        reply = http.request(method, path, json=infer() if method == "POST" else None)
    assert reply.status_code == status and isinstance(reply.json()["error"], str), reply.text


def test_what_a_server_says_that_it_can_do_it_has(live: Live) -> None:
    with live.http() as http:
        told = http.get("/v2").json()["extensions"]
        assert told == ["model_repository"] and http.post("/v2/repository/index", json={}).status_code == 200


def test_a_failure_of_the_engine_has_each_protocols_shape(live: Live) -> None:
    live.async_engine.fail_after = (1, EngineDead("The engine has ended."))
    with live.http() as http:
        for path, make in DOORS.items():
            reply = http.post(path, json=make())
            assert reply.status_code >= 500 and isinstance(reply.json()["error"], str), reply.text


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
def test_bounds_in_tokens_on_both_sides_of_their_limit(live: Live, path: str, name: str) -> None:
    body: dict[str, Any] = {"model": "tiny"} | (
        {"input": "hi"}
        if path == "/v1/responses"
        else {"prompt": "hi"}
        if path == "/v1/completions"
        else {"messages": HI}
    )
    with live.http() as http:
        assert http.post(path, json={**body, name: MOST_TOKENS}).status_code == 200
        for value in (MOST_TOKENS + 1, 2**70, -1):
            reply = http.post(path, json={**body, name: value})
            assert reply.status_code == 400 and name in reply.text, reply.text


SOCKET_LIMITS: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {
    "/v1/stream": SHARED
    | {
        "max_tokens": ([1, MOST_TOKENS], [-1, 1.5, MOST_TOKENS + 1, 2**70]),
        "min_p": ([0, 1], [-0.01, ABOVE]),
        "n": ([1, 4], [0, -1, 129, 2**70]),
        "presence_penalty": ([-2, 2], [-2.01, 2.01]),
        "repetition_penalty": ([0.01, 2], [0, 2.01]),
        "top_logprobs": ([0, 20], [-1, 21]),
        "id": (["i", "i" * 64], ["", "i" * 65, 3]),
    },
    "/v1/responses": {name: SHARED[name] for name in ("temperature", "top_p", "top_k", "seed")}
    | {
        "max_output_tokens": ([1, MOST_TOKENS], [-1, 1.5, MOST_TOKENS + 1, 2**70]),
        "top_logprobs": ([0, 20], [-1, 21]),
        "stream_id": (["i", "i" * 64], ["", "i" * 65, 3]),
    },
}
SOCKET_CASES = [(path, name, *values) for path, limits in SOCKET_LIMITS.items() for name, values in limits.items()]


@pytest.mark.parametrize(("path", "name", "good", "bad"), SOCKET_CASES)
def test_messages_of_websockets_on_both_sides_of_a_limit(
    live: Live, path: str, name: str, good: list[Any], bad: list[Any]
) -> None:
    asked = {"type": "generate", "id": "a", "messages": HI, "max_tokens": 4}
    if path == "/v1/responses":
        asked = {"type": "response.create", "input": "hi"}
    if name == "top_logprobs" and path == "/v1/stream":
        asked["logprobs"] = True
    ends = ("done", "response.completed", "response.incomplete", "error")
    with socket_of(live, path) as sock:
        for values, is_taken in ((good, True), (bad, False)):
            for value in values:
                tell(sock, {**asked, name: value})
                last = hear_ends(sock, 1, ends)[-1]
                assert (last["type"] != "error") == is_taken, (value, last)
                if not is_taken:
                    assert last["status"] == 400 and last["error"]["param"] == name, (value, last)


MOST_UINT32 = 2**32 - 1
RPC_LIMITS: dict[str, tuple[list[Any], list[Any]]] = {
    **{name: SHARED[name] for name in ("temperature", "top_p", "frequency_penalty")},
    "top_k": ([1, MOST_TOP_K], [-2, MOST_TOP_K + 1]),
    "seed": ([0, MOST_SEED], []),
    "max_tokens": ([1, MOST_UINT32], []),
    "min_tokens": ([0, 4], [MOST_UINT32]),
    "min_p": ([0, 1], [-0.01, ABOVE]),
    "presence_penalty": ([-2, 2], [-2.01, 2.01]),
    "repetition_penalty": ([0.01, 2], [0, 2.01]),
    "stop": ([["x" * 256], ["x"] * 16], [["x" * 257], ["x"] * 17]),
}
"""What a field's type cannot hold never leaves the client."""


@pytest.mark.parametrize("name", RPC_LIMITS)
def test_calls_on_both_sides_of_a_limit(live: Live, name: str) -> None:
    good, bad = RPC_LIMITS[name]
    method, answer = f"{GENERATION}/GenerateUnary", "rootgraft.v1.GenerateResponse"
    if isinstance(bad and bad[0], float):
        bad = [*bad, float("inf"), float("-inf"), float("nan")]
    with rpc_of(live) as rpc:
        for value in good:
            rpc.unary(method, generate_request(prompt="hi", sampling={"max_tokens": 8, name: value}), answer)
        for value in bad:
            with pytest.raises(grpc.RpcError) as caught:
                rpc.unary(method, generate_request(prompt="hi", sampling={"max_tokens": 8, name: value}), answer)
            told = dict(caught.value.trailing_metadata())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (value, caught.value.details())
            assert told["error-param"].startswith(name), (value, told)


TEXT_LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model": ({"model": "tiny"}, {"model": "x" * 257}),
    "prompt_cache_key": ({"cache_key": "k" * 256}, {"cache_key": "k" * 257}),
    "priority": ({"priority": "batch"}, {"priority": "high"}),
    "guided_regex": ({"regex": "[a-z ]+0"}, {"regex": "a" * 65_537}),
    "guided_choice": ({"choices": {"texts": ["answer 0"]}}, {"choices": {"texts": []}}),
}


@pytest.mark.parametrize("name", TEXT_LIMITS)
def test_texts_of_calls_on_both_sides_of_a_limit(live: Live, name: str) -> None:
    method, answer = f"{GENERATION}/GenerateUnary", "rootgraft.v1.GenerateResponse"
    with rpc_of(live) as rpc:
        good, bad = (generate_request(prompt="hi", **fields) for fields in TEXT_LIMITS[name])
        assert rpc.unary(method, good, answer).text == "answer 0"
        with pytest.raises(grpc.RpcError) as caught:
            rpc.unary(method, bad, answer)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert name in caught.value.details(), caught.value.details()
