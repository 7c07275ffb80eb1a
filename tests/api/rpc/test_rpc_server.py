"""The gRPC server: reflection, health, limits on sizes and slow readers."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.api.rpc_live import GENERATION, RpcClient, chat_request, generate_request
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.api.http.app import create_app
from rootgraft.api.http.grpc_door import open_rpc
from rootgraft.api.rpc.messages import message
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
    assert open_rpc(app, ServerConfig()) is None

    async def job() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"--grpc-port {port} cannot be used"):
                open_rpc(app, ServerConfig(grpc_port=port))

    asyncio.run(job())


def test_messages_are_found_by_name() -> None:
    assert message("rootgraft.v1.Usage")(prompt_tokens=3).prompt_tokens == 3
