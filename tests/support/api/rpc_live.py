"""A gRPC server on a live server's application, and calls of it with nothing but grpcio and the descriptors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from rootgraft.api.http.app import create_app
from rootgraft.api.rpc.messages import message
from rootgraft.api.rpc.rpc_server import MAX_CONNECTIONS, RpcServer
from support.api.api_live import Live
from support.machine.waits import HANG_SECONDS

GENERATION, INFERENCE = "/rootgraft.v1.Generation", "/inference.GRPCInferenceService"


class RpcClient:
    """Calls methods by name on one connection."""

    def __init__(self, channel: Any, live: Live, address: str, server: RpcServer) -> None:
        self.channel, self.live, self.address, self.server = channel, live, address, server

    def unary(self, method: str, request: Any, answer: str, **options: Any) -> Any:
        options = {"timeout": 60, **options}
        call = self.channel.unary_unary(method, _bytes, message(answer).FromString)
        return call(request, **options)

    def stream(self, method: str, request: Any, answer: str, **options: Any) -> Any:
        options = {"timeout": 60, **options}
        return self.channel.unary_stream(method, _bytes, message(answer).FromString)(request, **options)

    def both(self, method: str, requests: Any, answer: str, **options: Any) -> Any:
        options = {"timeout": 60, **options}
        return self.channel.stream_stream(method, _bytes, message(answer).FromString)(requests, **options)


def _bytes(request: Any) -> bytes:
    return request.SerializeToString() if isinstance(request, Message) else bytes(request)


@contextmanager
def rpc_of(live: Live, connections: int = MAX_CONNECTIONS) -> Iterator[RpcClient]:
    """Serve gRPC beside a live server within the block."""

    async def start() -> RpcServer:
        server = RpcServer(create_app(live.state), live.state, 0, connections)
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(start(), live.loop).result(HANG_SECONDS)
    try:
        address = f"127.0.0.1:{server.port}"
        with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
            yield RpcClient(channel, live, address, server)
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), live.loop).result(HANG_SECONDS)


def generate_request(**fields: Any) -> Any:
    return message("rootgraft.v1.GenerateRequest")(**fields)


def chat_request(*texts: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text} for text in texts]
    return generate_request(chat={"messages": messages}, **fields)
