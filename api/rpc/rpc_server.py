"""gRPC server: its services on one port, with reflection and health checks, in the HTTP server's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from ...engine.errors import CapacityError, ConfigError
from ..config import ServerConfig
from ..generate.server_state import ServerState
from ..large_bodies import note_body
from . import generation_service, inference_service
from .app_calls import AppCalls, CallError
from .call_server import CallServer
from .call_shares import MAX_CALLS, CallShares
from .generation_service import GenerationService
from .inference_service import InferenceService
from .messages import message, pool

HEALTH = "grpc.health.v1.Health"
WATCH_SECONDS = 1.0
MAX_STREAMS = 1000
"""Largest number of concurrent calls of one connection."""
MAX_CONNECTIONS = MAX_CALLS
"""Largest number of connections. A tenant may use its share for calls; idle ones close after ``_IDLE_SECONDS``."""
MAX_METADATA_BYTES = 16 << 10
"""Largest size of a call's metadata in bytes. As in HTTP/2, an entry counts its name, its value and 32 bytes."""
_IDLE_SECONDS = 60.0
_HANDSHAKE_SECONDS = 10.0
_GRACE = 2.0
_SERVICES = (generation_service.NAME, inference_service.NAME)

Method = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncGenerator[Any, None]]


class RpcServer:
    """Serves an application's routes over gRPC. Belongs to one event loop.

    Args:
        app: the application, with all of its middleware.
        state: state of the application, for keys and options.
        connections: largest number of open connections.

    Raises:
        ConfigError: the port is in use, or the certificate cannot be used.

    Attributes:
        port: port on which the server listens.
        shares: shares of the open calls, by tenant.
    """

    def __init__(self, app: ASGIApp, state: ServerState, port: int, connections: int = MAX_CONNECTIONS) -> None:
        self._state, self._app = state, app
        self._limits = {
            "grpc.max_receive_message_length": state.options.max_request_bytes,
            # Between the two limits, gRPC would refuse calls at random, so both limits are equal.
            "grpc.max_metadata_size": MAX_METADATA_BYTES,
            "grpc.absolute_max_metadata_size": MAX_METADATA_BYTES,
            "grpc.max_concurrent_streams": MAX_STREAMS,
            "grpc.max_allowed_incoming_connections": connections,
            "grpc.max_connection_idle_ms": round(_IDLE_SECONDS * 1000),
            "grpc.server_handshake_timeout_ms": round(_HANDSHAKE_SECONDS * 1000),
            "grpc.so_reuseport": 0,
            "grpc.http2.min_ping_interval_without_data_ms": 10_000,
            "grpc.keepalive_time_ms": 60_000,
            "grpc.keepalive_timeout_ms": 20_000,
        }
        self.shares = CallShares(lambda: state.limits.keys)
        self._server, self.port = self._listening(port)

    def _listening(self, port: int) -> tuple[CallServer, int]:
        """Return a server that has bound a port, and the port's number."""
        options = self._state.options
        server = CallServer([self.shares], self._limits)
        calls = AppCalls(self._app)
        for name, methods in (
            (generation_service.NAME, _generation(GenerationService(calls))),
            (inference_service.NAME, _inference(InferenceService(calls))),
            (HEALTH, _health(calls)),
        ):
            server.add_registered_method_handlers(name, methods)
        names = (*_SERVICES, HEALTH, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, pool=_Pools())
        host = f"[{options.host}]" if ":" in options.host else options.host
        try:
            return server, _listen(server, f"{host}:{port}", options)
        except RuntimeError as error:
            raise ConfigError(f"--grpc-port {port} cannot be used: {error}") from None

    async def start(self) -> None:
        """Start accepting calls."""
        await self._server.start()

    async def close(self) -> None:
        """Accept no new calls, and cut off calls that still run after ``_GRACE`` seconds."""
        await self._server.stop(_GRACE)


def _listen(server: Any, address: str, options: ServerConfig) -> int:
    if options.ssl_certfile is None:
        return int(server.add_insecure_port(address))
    certificate = Path(options.ssl_certfile).read_bytes()
    key = Path(options.ssl_keyfile or options.ssl_certfile).read_bytes()
    roots = None if options.ssl_ca_certs is None else Path(options.ssl_ca_certs).read_bytes()
    credentials = grpc.ssl_server_credentials([(key, certificate)], roots, options.ssl_cert_reqs == 2)
    return int(server.add_secure_port(address, credentials))


class _Pools:
    """Descriptors of this server's messages and of the health service's messages, for reflection."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("Find"):
            raise AttributeError(name)
        pools = (pool(), health_pb2.DESCRIPTOR.pool)

        def find(*args: Any) -> Any:
            try:
                return getattr(pools[0], name)(*args)
            except KeyError:
                return getattr(pools[1], name)(*args)

        return find


def _generation(service: GenerationService) -> dict[str, Any]:
    kind = message("rootgraft.v1.GenerateRequest")
    stream = grpc.unary_stream_rpc_method_handler(_streaming(kind, service.stream), response_serializer=_serialized)
    return {"GenerateUnary": _unary(kind, service.unary), "Generate": stream}


def _inference(service: InferenceService) -> dict[str, Any]:
    kind = message("inference.ModelInferRequest")
    handlers = {name: _unary(message(f"inference.{name}Request"), method) for name, method in service.unary.items()}

    async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[Any, None]:
        async def parsed() -> AsyncGenerator[Any, None]:
            async for data in requests:
                note_body(len(data))
                yield _parsed(kind, data)

        try:
            async for answer in service.stream(parsed(), context):
                yield answer
        except (CallError, CapacityError) as error:
            await _abort(context, error)

    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(stream, response_serializer=_serialized)
    return handlers


def _health(calls: AppCalls) -> dict[str, Any]:
    """Return the handlers of gRPC's health service, which reports the same as ``/health/ready``."""
    kind, response = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse

    async def status() -> Any:
        is_ready = await calls.status(None, "/health/ready") == 200
        return response.SERVING if is_ready else response.NOT_SERVING

    async def check(request: Any, context: Any) -> Any:
        if request.service not in ("", HEALTH, *_SERVICES):
            raise CallError(grpc.StatusCode.NOT_FOUND, "There is no such service.")
        return response(status=await status())

    async def watch(request: Any, context: Any) -> AsyncGenerator[Any, None]:
        told = None
        while True:
            known = request.service in ("", HEALTH, *_SERVICES)
            now = await status() if known else response.SERVICE_UNKNOWN
            if now != told:
                told = now
                yield response(status=now)
            await asyncio.sleep(WATCH_SECONDS)

    stream = grpc.unary_stream_rpc_method_handler(_streaming(kind, watch), response_serializer=_serialized)
    return {"Check": _unary(kind, check), "Watch": stream}


def _unary(kind: Any, method: Method) -> Any:
    async def call(data: bytes, context: Any) -> Any:
        note_body(len(data))
        try:
            return await method(_parsed(kind, data), context)
        except (CallError, CapacityError) as error:
            await _abort(context, error)

    return grpc.unary_unary_rpc_method_handler(call, response_serializer=_serialized)


def _streaming(kind: Any, method: Stream) -> Any:
    async def call(data: bytes, context: Any) -> AsyncGenerator[Any, None]:
        note_body(len(data))
        try:
            async for answer in method(_parsed(kind, data), context):
                yield answer
        except (CallError, CapacityError) as error:
            await _abort(context, error)

    return call


def _parsed(kind: Any, data: bytes) -> Any:
    """Parse a message. Raises CallError, because gRPC itself would answer a malformed one with an internal error."""
    try:
        return kind.FromString(data)
    except DecodeError:
        name = kind.DESCRIPTOR.full_name
        raise CallError(grpc.StatusCode.INVALID_ARGUMENT, f"The message is no {name}.") from None


async def _abort(context: Any, error: CallError | CapacityError) -> None:
    if isinstance(error, CapacityError):  # No thread is available for a large message at present.
        error = CallError(grpc.StatusCode.UNAVAILABLE, str(error))
    await context.abort(error.status, error.message, error.trailers)


def _serialized(answer: Any) -> bytes:
    data: bytes = answer.SerializeToString()
    return data
