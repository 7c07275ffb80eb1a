"""Routes with a direct handler answer as the framework's own handling of the same endpoint does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from support.api.api_live import make_state

from rootgraft.api.config import ServerConfig
from rootgraft.api.error_responses import HANDLED, handle
from rootgraft.api.generate.model_directory import ModelDirectory
from rootgraft.api.generate.model_router import ModelRouter
from rootgraft.api.http.app import create_app
from rootgraft.api.http.direct_routes import DirectRoutes
from rootgraft.api.http.guard import Guard, Identify
from rootgraft.api.routes import anthropic, batches, chat, completions, responses
from rootgraft.api.routes.dependencies import Handler, JsonRoute

DIRECT = {
    "/v1/chat/completions": chat.create_chat_completion,
    "/v1/completions": completions.create_completion,
    "/v1/responses": responses.create_response,
    "/v1/responses/input_tokens": responses.count_input_tokens,
    "/v1/messages": anthropic.create_message,
    "/v1/messages/count_tokens": anthropic.count_message_tokens,
    "/v1/batches": batches.create_batch,
}
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3}
BODIES = (
    *(b"", b"{", b"null", b"[]", b"7", b'"text"', b"{}", b"[" * 2000, b"\xff", b'{"a": NaN}'),
    *(json.dumps(body).encode() for body in (
        ASK,
        {name: ASK[name] for name in ("model", "messages")},
        ASK | {"stream": True},
        ASK | {"prompt": "Hi.", "messages": None},
        ASK | {"input": "Hi.", "messages": None, "max_tokens": None},
        ASK | {"temperature": "hot"},
        ASK | {"temperature": 9},
        ASK | {"nobody": {"knows": 1}},
        ASK | {"model": "unknown"},
        ASK | {"messages": [{"role": "user", "content": 5}]},
        ASK | {"messages": [{"role": "user", "content": "Hi.", "odd": 1}]},
        ASK | {"max_tokens": 1_000_000},
    )),
)  # fmt: skip


class FrameworkRoute(JsonRoute):
    """A route as before there were direct ones: FastAPI parses, validates and calls."""

    def direct_handler(self) -> Handler | None:
        return None


def framework_app(options: ServerConfig) -> FastAPI:
    state = make_state(options)
    app = FastAPI(redirect_slashes=False)
    app.state.models = ModelRouter([state])
    router = APIRouter(route_class=FrameworkRoute)
    for path, endpoint in DIRECT.items():
        router.post(path)(endpoint)
    app.include_router(router)
    for kind in HANDLED:
        app.add_exception_handler(kind, handle)
    app.add_middleware(Guard, state=state)
    app.add_middleware(Identify, state=state)
    return app


async def answer(app: Callable[..., Awaitable[None]], path: str, body: bytes, kind: bytes) -> tuple[int, Any, bytes]:
    """Send a request. Returns status, headers but for those of this answer alone, and body."""
    sent: list[Any] = []
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return left.pop() if left else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", kind), (b"x-request-id", b"the-same")]
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    return sent[0]["status"], sorted(sent[0]["headers"]), b"".join(part.get("body", b"") for part in sent[1:])


def without_ids(body: bytes) -> Any:
    """Return the body with what differs between two answers to the same request left out."""
    if not body.startswith(b"{"):
        return body.count(b"data: ")
    differing = ("id", "created", "created_at", "completed_at", "output")
    return {name: value for name, value in json.loads(body).items() if name not in differing}


@pytest.mark.parametrize("path", DIRECT)
@pytest.mark.parametrize("unknown_fields", ["refuse", "ignore"])
async def test_a_direct_route_answers_as_the_framework_does(path: str, unknown_fields: str) -> None:
    options = ServerConfig(unknown_fields=unknown_fields)
    direct, framework = create_app(make_state(options)), framework_app(options)
    statuses = set()
    for body in BODIES:
        for kind in (b"application/json", b"application/json; charset=utf-8", b"text/plain"):
            status, headers, text = await answer(direct, path, body, kind)
            other = await answer(framework, path, body, kind)
            statuses.add(status)
            lengths = (b"content-length",) if status == 200 else ()  # ids in an answer have no fixed length
            assert status == other[0], (body, text, other[2])
            assert [h for h in headers if h[0] not in lengths] == [h for h in other[1] if h[0] not in lengths]
            assert without_ids(text) == without_ids(other[2]), body
    assert {400, 415} <= statuses and 500 not in statuses and (path == "/v1/batches" or 200 in statuses)


def test_the_busiest_routes_are_direct_and_no_others() -> None:
    modules = (anthropic, batches, chat, completions, responses)
    app = DirectRoutes(create_app(make_state()), routes=[route for each in modules for route in each.router.routes])
    refused = {"/v1/responses/compact"}  # whatever it is asked
    assert {path for _, path in app._routes} == DIRECT.keys() | refused


async def test_a_bug_behind_a_direct_route_is_told_as_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelDirectory, "find", None)
    status, headers, body = await answer(
        create_app(make_state()), "/v1/chat/completions", BODIES[10], b"application/json"
    )
    assert status == 500 and (b"x-request-id", b"the-same") in headers
    assert json.loads(body)["error"]["code"] == "internal_error"
