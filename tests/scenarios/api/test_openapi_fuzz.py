"""Schemathesis on our own OpenAPI document: whatever it makes of it, no request is answered with a 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import GenerationMode
from schemathesis.pytest.lazy import get_all_tests
from support.api.api_live import Live, make_state, serve
from support.machine.thoroughness import repeats, taking_turns
from support.machine.waits import HANG_SECONDS

from rootgraft.api.error_responses import speaks_anthropic, speaks_inference, speaks_ollama, speaks_tgi
from rootgraft.api.generate.server_state import ServerState
from rootgraft.api.http.app import create_app
from rootgraft.engine.errors import RequestError


class NoAdapters:
    """What an engine without adapters says to calls about them."""

    async def load_adapter(self, *_: Any, **__: Any) -> None:
        raise RequestError("The engine was started without adapters (--enable-lora).")

    unload_adapter = list_adapters = load_adapter


FORM_MISSED = "The answer does not match the requested format."
SETTINGS = settings(
    max_examples=repeats(12),
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)


@pytest.fixture(scope="module")
def state() -> ServerState:
    state = make_state()
    for name in ("load_adapter", "unload_adapter", "list_adapters"):
        setattr(state.engine.client, name, getattr(NoAdapters(), name))
    return state


@pytest.fixture(scope="module")
def schema(state: ServerState) -> Any:
    """The document, read when the test runs: its requests are drawn then, and not by each process that collects."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(state))
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    return schema


@pytest.fixture(scope="module")
def fuzzed(state: ServerState) -> Iterator[Live]:
    yield from serve(state)


def check_error(path: str, body: dict[str, Any]) -> None:
    """An error has the fields of its route's protocol, and a text."""
    if speaks_ollama(path) or speaks_inference(path) or speaks_tgi(path):
        fields = {"error", "code", "param"} | ({"error_type"} if speaks_tgi(path) else set())
        assert set(body) == fields and isinstance(body["error"], str) and body["error"]
    else:
        assert set(body) == ({"type", "error", "request_id"} if speaks_anthropic(path) else {"error"})
        assert body["error"]["message"]


def is_missed_grammar(case: Any, text: str) -> bool:
    """Whether TGI's ``parameters.grammar`` was asked for, which the stand-in for the engine does not follow."""
    parameters = case.body.get("parameters") if isinstance(case.body, dict) else None
    asks = isinstance(parameters, dict) and parameters.get("grammar") is not None
    return speaks_tgi(case.operation.path) and asks and FORM_MISSED in text


@pytest.mark.heavy
def test_whatever_the_document_allows_or_forbids(
    schema: Any, fuzzed: Live, state: ServerState, subtests: pytest.Subtests
) -> None:
    """A third of the operations, in turns: the tests with an honest client ask for all of them, of the real server."""

    def check(case: Any) -> None:
        reply = case.call(base_url=fuzzed.url, timeout=HANG_SECONDS)
        assert reply.status_code < 500 or is_missed_grammar(case, reply.text), (reply.status_code, reply.text)
        if reply.status_code >= 400:
            check_error(case.operation.path, reply.json())
        assert reply.headers["x-request-id"]
        assert state.limits.active == 0 or case.operation.path == "/v1/responses"

    labels = [each.ok().label for each in schema.get_all_operations()]
    assert len(labels) > 40
    # The requests that cover an operation are drawn when its test is made, which takes most of the time: of none but
    # those whose turn it is.
    drawn = taking_turns(labels, 3)
    asked = schema.include(name=drawn)
    made = [each.ok() for each in get_all_tests(schema=asked, test_func=check, settings=SETTINGS, given_kwargs={})]
    assert [operation.label for operation, _ in made] == drawn
    for operation, draw_and_check in made:
        with subtests.test(operation.label):
            draw_and_check()
