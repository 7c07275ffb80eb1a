"""Shares of gRPC calls: bounds in all and for a tenant, from both sides, and what gives a call back."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from support.api.api_live import Live
from support.api.rpc_live import GENERATION, INFERENCE, RpcClient, chat_request, rpc_of
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.api.rpc import call_shares

ANSWER = "rootgraft.v1.GenerateResponse"


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_shares, "MAX_CALLS", 4)


@contextmanager
def open_calls(rpc: RpcClient, count: int, key: str | None = None, *, beside: int = 0) -> Iterator[None]:
    """Keep streams open within the block, on which no message is sent, ``beside`` others."""
    nothing: queue.SimpleQueue[Any] = queue.SimpleQueue()
    calls, made = rpc.server.shares.calls, []
    # An answer comes before its call has ended on the server.
    wait_until(lambda: calls.total == beside)
    for number in range(count):
        made.append(
            rpc.both(
                f"{INFERENCE}/ModelStreamInfer",
                iter(nothing.get, None),
                "inference.ModelStreamInferResponse",
                **_of(key),
            )
        )
        wait_until(lambda number=number: calls.total == beside + number + 1)
    try:
        yield
    finally:
        for call in made:
            call.cancel()
            nothing.put(None)
        wait_until(lambda: calls.total == beside)


def _of(key: str | None) -> dict[str, Any]:
    return {} if key is None else {"metadata": [("authorization", f"Bearer {key}")]}


def ask(rpc: RpcClient, key: str | None = None) -> str:
    """Ask for an answer, and wait for the end of the call on the server, which comes after it."""
    calls = rpc.server.shares.calls
    before = calls.total
    text: str = rpc.unary(f"{GENERATION}/GenerateUnary", chat_request("hi"), ANSWER, **_of(key)).text
    wait_until(lambda: calls.total == before)
    return text


def refused(rpc: RpcClient, key: str | None = None) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        ask(rpc, key)
    return caught.value


@pytest.mark.usefixtures("few_calls")
def test_without_keys_all_calls_are_one_tenants(live: Live) -> None:
    with rpc_of(live) as rpc:
        with open_calls(rpc, 3):
            assert ask(rpc) == "answer 0"
        with open_calls(rpc, 4):
            error = refused(rpc)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.details() == "You already have 4 open calls: end one of them."
            assert ("retry-after", "5") in [tuple(each) for each in error.trailing_metadata()]
        assert ask(rpc) == "answer 0"


@pytest.mark.usefixtures("few_calls")
def test_a_tenant_leaves_as_much_as_it_has(serve_with: Any) -> None:
    live: Live = serve_with(ServerConfig(api_key=("first", "second")))
    with rpc_of(live) as rpc, ExitStack() as stack:
        stack.enter_context(open_calls(rpc, 2, "first"))
        assert refused(rpc, "first").code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ask(rpc, "second") == "answer 0"
        assert rpc.unary(f"{GENERATION}/GenerateUnary", chat_request("hi"), ANSWER, metadata=[("x-api-key", "second")])
        wait_until(lambda: rpc.server.shares.calls.total == 2)
        # Those without a valid key are one more tenant, who gets no share of the others.
        assert refused(rpc).code() is grpc.StatusCode.UNAUTHENTICATED
        stack.enter_context(open_calls(rpc, 1, "wrong", beside=2))
        assert refused(rpc, "wrong").code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ask(rpc, "second") == "answer 0"


@pytest.mark.usefixtures("few_calls")
def test_calls_of_a_connection_that_is_lost_are_given_back(live: Live) -> None:
    """Also one whose message never comes."""
    with rpc_of(live) as rpc:
        lost = grpc.insecure_channel(
            rpc.address, [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        )
        client = RpcClient(lost, live, rpc.address, rpc.server)
        nothing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        silent = lost.stream_unary(f"{GENERATION}/GenerateUnary", bytes, bytes)
        call = silent.future(iter(nothing.get, None), timeout=HANG_SECONDS)
        wait_until(lambda: rpc.server.shares.calls.total == 1)
        assert ask(client) == "answer 0"
        lost.close()
        wait_until(lambda: rpc.server.shares.calls.total == 0)
        nothing.put(None)
        assert call.cancelled() or call.exception() is not None
