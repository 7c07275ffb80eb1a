"""Bodies that are not declared as JSON: taken of programs, never of a browser's page."""

from __future__ import annotations

import itertools
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.api.api_live import Live
from support.machine.thoroughness import repeats

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "hi"},
}
FORM = "application/x-www-form-urlencoded"
OF_BROWSERS = (
    {"origin": "https://example.org"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-mode": "no-cors"},
    {"sec-ch-ua": '"Chromium"'},
    {"referer": "https://example.org/"},
    {"user-agent": "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"},
)


def post(live: Live, path: str, body: bytes, kind: str | None, **more: str) -> httpx.Response:
    headers = {**({} if kind is None else {"content-type": kind}), **more}
    with live.http() as http:
        request = http.build_request("POST", path, content=body, headers=headers)
        return http.send(request)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("kind", [None, "", FORM, f"{FORM}; charset=UTF-8"])
def test_undeclared_json_of_a_program_is_taken(live: Live, path: str, kind: str | None) -> None:
    assert post(live, path, json.dumps(ROUTES[path]).encode(), kind).status_code == 200
    for body in (b"", b"a=1&b=2", b'{"prompt": ', b"[1]", b"5"):
        reply = post(live, path, body, kind)
        assert reply.status_code == 415 and "Content-Type: application/json" in reply.text


def test_what_is_wrong_in_it_is_told(live: Live) -> None:
    reply = post(live, "/v1/completions", b'{"prompt": 5}', FORM)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(("path", "marks"), [*itertools.product(ROUTES, OF_BROWSERS)])
def test_a_browser_has_to_declare_it(live: Live, path: str, marks: dict[str, str]) -> None:
    body = json.dumps(ROUTES[path]).encode()
    of_another_page = "origin" in marks  # without keys, these get nothing whatever they declare
    for kind in (None, "", FORM, "text/plain", "multipart/form-data"):
        assert post(live, path, body, kind, **marks).status_code == (403 if of_another_page else 415)
    assert post(live, path, body, "application/json", **marks).status_code == (403 if of_another_page else 200)
    assert len(live.async_engine.seen) == (path != "/tokenize" and not of_another_page)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=repeats(50))
@given(
    kind=st.one_of(st.none(), st.sampled_from(["", FORM, "text/plain", "multipart/form-data", "text/json", "*/*"])),
    marks=st.lists(st.sampled_from(OF_BROWSERS), max_size=2),
)
def test_only_programs_leave_it_out(live: Live, kind: str | None, marks: list[dict[str, str]]) -> None:
    headers = {name: value for each in marks for name, value in each.items()}
    reply = post(live, "/tokenize", b'{"prompt": "hi"}', kind, **headers)
    assert reply.status_code in ((200,) if kind in (None, "", FORM) and not marks else (403, 415))
