"""The gRPC server: reflection, health, limits on sizes and slow readers."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.api.api_live import Live
from support.api.rpc_live import GENERATION, RpcClient, chat_request, generate_request, rpc_of
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.api.generate.server_state import ServerState
from rootgraft.api.http.app import create_app
from rootgraft.api.http.grpc_door import open_rpc
from rootgraft.api.observe.metrics import Metrics
from rootgraft.api.rpc.messages import message
from rootgraft.api.rpc.rpc_server import MAX_METADATA_BYTES
from rootgraft.engine.errors import ConfigError

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_reflection(rpc: RpcClient) -> None:
    database = ProtoReflectionDescriptorDatabase(rpc.channel)
    names = {"rootgraft.v1.Generation", "inference.GRPCInferenceService", "grpc.health.v1.Health"}
    assert names < set(database.get_services())
    for name in names:
        assert database.FindFileContainingSymbol(name).service
    found = database.FindFileContainingSymbol("rootgraft.v1.GenerateRequest")
    assert "json_schema" in [field.name for field in found.message_type[0].field]


def test_health(rpc: RpcClient) -> None:
    health = health_pb2_grpc.HealthStub(rpc.channel)
    for service in ("", "rootgraft.v1.Generation"):
        assert health.Check(health_pb2.HealthCheckRequest(service=service), timeout=HANG_SECONDS).status == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="nope"), timeout=HANG_SECONDS)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=HANG_SECONDS)
    assert next(watch).status == SERVING
    rpc.live.state.engine.draining = True
    assert next(watch).status == NOT_SERVING
    watch.cancel()


def test_a_message_that_is_too_large(rpc: RpcClient) -> None:
    request = generate_request(prompt="x" * (rpc.live.state.options.max_request_bytes + 1))
    with pytest.raises(grpc.RpcError) as caught:
        rpc.unary(f"{GENERATION}/GenerateUnary", request, "rootgraft.v1.GenerateResponse")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_metadata_have_one_bound_and_not_a_range_of_chance(rpc: RpcClient) -> None:
    def call(size: int) -> Any:
        metadata = [("x-note", "a" * size)]
        return rpc.unary(
            f"{GENERATION}/GenerateUnary", chat_request("hi"), "rootgraft.v1.GenerateResponse", metadata=metadata
        )

    fits = MAX_METADATA_BYTES - 1024  # what the client's library adds is less
    assert [call(fits).text for _ in range(20)] == ["answer 0"] * 20
    with pytest.raises(grpc.RpcError) as caught:
        call(MAX_METADATA_BYTES)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert call(fits).text == "answer 0"


def test_a_slow_reader_slows_its_stream_alone(rpc: RpcClient) -> None:
    """Of an answer that nobody reads, the engine's deltas wait in one list, and no message is made of them."""
    rpc.live.async_engine.say = lambda request, index: "x" * 1900
    stream = rpc.stream(f"{GENERATION}/Generate", chat_request("hi"), "rootgraft.v1.GenerateChunk")
    next(stream)
    answer = rpc.unary(f"{GENERATION}/GenerateUnary", chat_request("ho"), "rootgraft.v1.GenerateResponse")
    assert len(answer.text) == 1900
    assert sum(len(piece.text) for piece in stream) == 1899
    wait_until(lambda: rpc.live.state.limits.active == 0)


def test_an_unknown_method(rpc: RpcClient) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        rpc.unary(f"{GENERATION}/Nope", b"", "rootgraft.v1.GenerateResponse")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_port_that_is_taken(rpc: RpcClient, live: Any) -> None:
    app = create_app(live.state)
    assert open_rpc(app, _state_with(None)) is None

    async def job() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"--grpc-port {port} cannot be used"):
                open_rpc(app, _state_with(port))

    asyncio.run(job())


def _state_with(port: int | None) -> ServerState:
    return ServerState(ServerConfig(grpc_port=port), Metrics("model", dict))


def test_connections_of_all_have_a_bound(live: Live) -> None:
    with rpc_of(live, connections=2) as rpc, ExitStack() as stack:
        _check(rpc.channel)
        own_pool = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        second = stack.enter_context(grpc.insecure_channel(rpc.address, own_pool))
        _check(second)
        host, port = rpc.address.split(":")
        with socket.create_connection((host, int(port)), HANG_SECONDS) as third:
            assert third.recv(1) == b"", "a connection beyond the bound is closed at once"
        _check(second)
        second.close()
        # The server sees the end of a connection at some time after its client.
        wait_until(lambda: _is_taken(host, int(port)))


def _check(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=HANG_SECONDS).status == SERVING


def _is_taken(host: str, port: int) -> bool:
    with socket.create_connection((host, port), HANG_SECONDS) as sock:
        return sock.recv(1) != b""


def test_messages_are_found_by_name() -> None:
    assert message("rootgraft.v1.Usage")(prompt_tokens=3).prompt_tokens == 3
