"""What is wrong with a request is said with status, param and code, whatever is wrong. Each row is one request."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pytest
from support.api.api_live import Live
from support.api.bad import bad_fields
from support.api.bad.bad_fields import GOOD
from support.api.bad.bad_inputs import CASES, CHAT, CHAT_NUMBERS, COMPLETION_NUMBERS, COMPLETIONS, HI, RAW
from support.api.reply_checks import check_error, complete


def test_the_table_is_large_enough() -> None:
    distinct = {str(case[:2]) for case in (*CASES, *bad_fields.CASES)}
    assert len(distinct) + len(RAW) * len(GOOD) >= 1_500
    assert {path for path, *_ in bad_fields.CASES} == GOOD.keys()


def check_cases(live: Live, cases: Sequence[Any], body_of: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    with live.http() as http:
        for path, fields, param, code in cases:
            try:
                check_error(http.post(path, json=body_of(path, fields)), 400, param, code)
            except AssertionError as error:
                raise AssertionError(f"{path} {str(fields)[:200]}: {error}") from error
    assert not live.async_engine.seen


@pytest.mark.parametrize("part", range(8))
def test_the_table(live: Live, part: int) -> None:
    check_cases(live, CASES[part::8], complete)


@pytest.mark.parametrize("part", range(8))
def test_the_families(live: Live, part: int) -> None:
    check_cases(live, bad_fields.CASES[part::8], lambda path, fields: {**GOOD[path], **fields})


def test_bodies_that_are_no_json_for_us(live: Live) -> None:
    """On every route. The fields of the rows are those of completions; what is wrong comes before the fields."""
    with live.http(headers={"content-type": "application/json"}) as http:
        for path in GOOD:
            for body, code in RAW:
                reply = http.post(path, content=body)
                assert reply.status_code == 400, (path, body[:80], reply.text)
                if path == COMPLETIONS or code == "invalid_json":
                    assert reply.json()["error"]["code"] == code, (path, body[:80], reply.text)
    assert not live.async_engine.seen


@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data", "application/xml", "text/plain;application/json"]
)
def test_only_json_is_read(live: Live, kind: str) -> None:
    with live.http() as http:
        reply = http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": kind})
    message = check_error(reply, 415, None, None)
    assert "application/json" in message


def test_json_with_a_charset_is_json(live: Live) -> None:
    with live.http(headers={"content-type": "application/json; charset=utf-8"}) as http:
        assert http.post(COMPLETIONS, content=b'{"prompt": "x"}').status_code == 200


def test_a_byte_order_mark_before_a_body_is_passed_over(live: Live) -> None:
    """Windows' editors and PowerShell write one before the JSON of a file that a client then sends."""
    with live.http(headers={"content-type": "application/json"}) as http:
        for path in GOOD:
            plain, marked = (
                http.post(path, content=mark + orjson.dumps(GOOD[path])) for mark in (b"", codecs.BOM_UTF8)
            )
            assert marked.status_code == plain.status_code, path
            assert "invalid_json" not in marked.text, path


GOOD_TEXTS = ["\x00", "\ufeff", "שלום", "e" + "\u0301" * 500, "<|im_end|><s></s>", "\u2028", "𝄞", "\x7f\x1b[0m", " "]


def test_odd_texts_are_texts(live: Live) -> None:
    with live.http() as http:
        for text in GOOD_TEXTS:
            for path, body in (
                (COMPLETIONS, {"prompt": text}),
                (CHAT, {"messages": [{"role": "user", "content": text}]}),
            ):
                reply = http.post(path, content=orjson.dumps(body), headers={"content-type": "application/json"})
                assert reply.status_code == 200, (text, reply.text)


def test_bounds_themselves_are_taken(live: Live) -> None:
    with live.http() as http:
        for path, numbers in ((CHAT, CHAT_NUMBERS), (COMPLETIONS, COMPLETION_NUMBERS)):
            for name, _, low, high in numbers:
                for value in (low, high):
                    if value is not None:
                        reply = http.post(path, json=complete(path, {name: value}))
                        assert reply.status_code == 200, (name, value, reply.text)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/tokenize"])
def test_names_that_a_request_makes_up_are_quoted_shortened(live: Live, path: str) -> None:
    long = "x" * 1_000_000
    bodies = [{long: 1}]
    if path in (CHAT, COMPLETIONS):
        bodies += [{"stream": True, "stream_options": {long: 1}}, {"logit_bias": {long: 1}}]
    with live.http() as http:
        for fields in bodies:
            reply = http.post(path, json={**GOOD[path], **fields})
            assert reply.status_code == 400 and len(reply.content) < 1_200, (path, reply.text[:200])
            assert "xxx...xxx" in reply.json()["error"]["param"]


def test_a_model_that_is_not_there_is_quoted_shortened(live: Live) -> None:
    with live.http() as http:
        reply = http.get(f"/v1/models/{'x' * 20_000}")
    assert reply.status_code == 404 and len(reply.content) < 400


def test_of_repeated_keys_the_last_counts(live: Live) -> None:
    with live.http(headers={"content-type": "application/json"}) as http:
        assert http.post(COMPLETIONS, content=b'{"prompt": 5, "prompt": "x"}').status_code == 200


def test_ten_thousand_messages(live: Live) -> None:
    with live.http() as http:
        for count, code in ((4096, "context_length_exceeded"), (10_000, "invalid_value")):
            check_error(http.post(CHAT, json={"messages": HI * count}), 400, "messages", code)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "unknown_url"),
        ("POST", "/v1/moderations", 404, "unknown_url"),
        ("GET", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_routes_that_are_not_there(live: Live, method: str, path: str, status: int, code: str) -> None:
    with live.http() as http:
        check_error(http.request(method, path), status, None, code)


ENDS_IN_V1 = "The base URL of OpenAI's clients ends in /v1."


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/chat/completions", f"; there is {CHAT}. {ENDS_IN_V1}"),
        ("POST", "/v1/v1/completions", f"; there is {COMPLETIONS}. {ENDS_IN_V1}"),
        ("GET", "/models/tiny", f"; there is /v1/models/tiny. {ENDS_IN_V1}"),
        ("POST", "/v1/tokenize", "; there is /tokenize."),
        ("POST", "/v1/chat/completions/", f"; there is {CHAT}."),
        ("GET", "/v1//models", "; there is /v1/models."),
        ("GET", CHAT + "/", "."),
        ("POST", "/v1/moderations", "."),
        ("GET", "/nowhere", "."),
        ("GET", "/v1", "."),
        ("GET", "/%ff", None),
    ],
)
def test_a_route_that_is_not_there_is_named_with_the_one_that_was_meant(
    live: Live, method: str, path: str, hint: str | None
) -> None:
    with live.http() as http:
        message = check_error(http.request(method, path), 404, None, "unknown_url")
        long = http.get("/" + "x" * 5000)
    assert hint is None or message == f"There is no route {method} {path}{hint}"
    assert len(long.content) < 400


@pytest.mark.parametrize(
    ("method", "path", "methods"),
    [
        ("GET", CHAT, "POST"),
        ("POST", "/v1/responses/resp_1", "DELETE, GET"),
        ("PUT", "/v1/files", "GET, POST"),
        ("POST", "/ui", "GET"),
    ],
)
def test_all_methods_of_a_route_are_named(live: Live, method: str, path: str, methods: str) -> None:
    with live.http() as http:
        reply = http.request(method, path)
    message = check_error(reply, 405, None, "method_not_allowed")
    assert message == f"Method {method} is not allowed on this route; allowed: {methods}."
    assert reply.headers["allow"] == methods


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_unknown_models(live: Live, path: str) -> None:
    body = {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [97]}}.get(path) or complete(path, {})
    with live.http() as http:
        for name in ("gpt-9", ":x", "Tiny", "tiny:x", "tiny\x00", "../tiny"):
            check_error(http.post(path, json={**body, "model": name}), 404, "model", "model_not_found")
