"""How long an answer may be: a bound is a bound in every protocol, unless the operator wants it strict."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.api.api_live import Live

from rootgraft.api.config import ServerConfig

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


def asked(path: str, text: str, field: str, number: int) -> dict[str, Any]:
    """A request for so many tokens after a text."""
    said = [{"role": "user", "content": text}]
    prompts: dict[str, dict[str, Any]] = {
        CHAT: {"messages": said},
        COMPLETIONS: {"prompt": text},
        RESPONSES: {"input": text},
        MESSAGES: {"model": "tiny", "messages": said},
    }
    return {**prompts[path], field: number}


FIELDS = [
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (COMPLETIONS, "max_tokens"),
    (RESPONSES, "max_output_tokens"),
    (MESSAGES, "max_tokens"),
]


@pytest.mark.parametrize(("path", "field"), FIELDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(number=st.one_of(st.integers(1, 5000), st.integers(1, (1 << 63) - 1)), length=st.integers(1, 200))
def test_more_than_fits_is_what_fits(live: Live, path: str, field: str, number: int, length: int) -> None:
    with live.http() as http:
        reply = http.post(path, json=asked(path, "x" * length, field, number))
    assert reply.status_code == 200, reply.text
    seen = live.async_engine.seen[-1]
    assert seen.params.max_tokens == min(number, live.async_engine.max_model_len - len(seen.tokens))


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_the_code_says_that_the_prompt_alone_is_too_long(live: Live, path: str, field: str) -> None:
    limit = live.async_engine.max_model_len
    with live.http() as http:
        http.post(path, json=asked(path, "x", field, 1))
        room = limit - len(live.async_engine.seen[-1].tokens)
        assert http.post(path, json=asked(path, "x" * room, field, 10**9)).status_code == 200
        assert live.async_engine.seen[-1].params.max_tokens == 1
        for more in (1, 2, 100):
            reply = http.post(path, json=asked(path, "x" * (room + more), field, 1))
            assert reply.status_code == 400
            error = reply.json()["error"]
            if path == MESSAGES:
                count = limit + max(1, more - 1)
                assert error["message"] == f"prompt is too long: {count} tokens > {limit} maximum"
            else:
                assert error["code"] == "context_length_exceeded"
                assert f"maximum context length is {limit} tokens" in error["message"]


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_strictly_it_is_refused_by_its_name(serve_with: Any, path: str, field: str) -> None:
    live = serve_with(ServerConfig(strict_max_tokens=True))
    with live.http() as http:
        http.post(path, json=asked(path, "x", field, 1))
        room = live.async_engine.max_model_len - len(live.async_engine.seen[-1].tokens)
        assert http.post(path, json=asked(path, "x", field, room)).status_code == 200
        reply = http.post(path, json=asked(path, "x", field, room + 1))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["message"].startswith(f"'{field}' must be at most {room}, not {room + 1}: "), error
    if path != MESSAGES:
        assert (error["param"], error["code"]) == (field, "invalid_value")
