"""Schemathesis on our own OpenAPI document: whatever it makes of it, no request is answered with a 5xx."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import GenerationMode
from support.api.api_live import Live, make_state, serve
from support.machine.waits import HANG_SECONDS

from rootgraft.api.error_responses import speaks_anthropic
from rootgraft.api.http.app import create_app
from rootgraft.engine.errors import RequestError


class NoAdapters:
    """What an engine without adapters says to calls about them."""

    async def load_adapter(self, *_: Any, **__: Any) -> None:
        raise RequestError("The engine was started without adapters (--enable-lora).")

    unload_adapter = list_adapters = load_adapter


STATE = make_state()
for name in ("load_adapter", "unload_adapter", "list_adapters"):
    setattr(STATE.engine.client, name, getattr(NoAdapters(), name))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", create_app(STATE))
SCHEMA.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


@pytest.fixture(scope="module")
def fuzzed() -> Any:
    yield from serve(STATE)


@pytest.mark.heavy
@SCHEMA.parametrize()
@settings(
    max_examples=6,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
def test_whatever_the_document_allows_or_forbids(case: Any, fuzzed: Live) -> None:
    reply = case.call(base_url=fuzzed.url, timeout=HANG_SECONDS)
    assert reply.status_code < 500, (reply.status_code, reply.text)
    if reply.status_code >= 400:
        keys = {"type", "error", "request_id"} if speaks_anthropic(case.operation.path) else {"error"}
        assert set(reply.json()) == keys and reply.json()["error"]["message"]
    assert reply.headers["x-request-id"]
    assert STATE.limits.active == 0 or case.operation.path == "/v1/responses"
