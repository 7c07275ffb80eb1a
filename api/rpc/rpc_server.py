"""The gRPC server: its services on one port, with reflection and health, in the event loop of the HTTP server."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
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
from .call_shares import MAX_CALLS, CallShares
from .generation_service import GenerationService
from .inference_service import InferenceService
from .messages import message, pool

HEALTH = "grpc.health.v1.Health"
WATCH_SECONDS = 1.0
MAX_STREAMS = 1000
"""Calls of one connection that run at a time."""
MAX_CONNECTIONS = MAX_CALLS
"""Of those with a call a tenant has its share at most, and others are closed after ``_IDLE_SECONDS``."""
_IDLE_SECONDS = 60.0
_HANDSHAKE_SECONDS = 10.0
_GRACE = 2.0
_CLOSING_SECONDS = (0.02, 0.1, 0.5)
"""Pauses before the port is asked, from the end of the task that takes calls: the library closes it in the first."""
_log = logging.getLogger("rootgraft.server")
_SERVICES = (generation_service.NAME, inference_service.NAME)

Method = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncGenerator[Any, None]]


class RpcServer:
    """Serves an application's routes over gRPC. Belongs to one event loop.

    Args:
        app: with all of its middleware.
        state: of the application, for keys and options.
        connections: that may be open.

    Raises:
        ConfigError: the port is taken, or the certificate cannot be used.

    Attributes:
        port: that it listens on.
        shares: the calls that are open.
    """

    def __init__(self, app: ASGIApp, state: ServerState, port: int, connections: int = MAX_CONNECTIONS) -> None:
        self._state, self._app = state, app
        self._limits = {
            "grpc.max_receive_message_length": state.options.max_request_bytes,
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
        self._ended: set[Any] = set()
        self._waits: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._server, self.port = self._listening(port)

    def _listening(self, port: int) -> tuple[Any, int]:
        """Return a server of the library's that holds a port, and the port."""
        options = self._state.options
        server = grpc.aio.server(interceptors=[self.shares], options=list(self._limits.items()))
        calls = AppCalls(self._app)
        server.add_generic_rpc_handlers(
            (_generation(GenerationService(calls)), _inference(InferenceService(calls)), _health(calls))
        )
        names = (*_SERVICES, HEALTH, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, pool=_Pools())
        host = f"[{options.host}]" if ":" in options.host else options.host
        try:
            return server, _listen(server, f"{host}:{port}", options)
        except RuntimeError as error:
            raise ConfigError(f"--grpc-port {port} cannot be used: {error}") from None

    async def start(self) -> None:
        """Take calls."""
        tasks = await _started(self._server)
        self._keeper = asyncio.create_task(self._keep_open(tasks))

    async def close(self) -> None:
        """Take no new call, and cut off those that still run after two seconds."""
        if self._keeper is not None:
            self._keeper.cancel()
        await asyncio.gather(*(each.stop(_GRACE) for each in (self._server, *self._ended)), return_exceptions=True)

    async def _keep_open(self, tasks: set[asyncio.Task[Any]]) -> None:
        """Open the port again whenever a client has closed it, and let calls that run go on where they are.

        The library ends a server at a method's name that is no UTF-8: one call would close the door for everybody.
        """
        while True:
            # Without any task that has begun with the server, and might end with it, the port is asked now and then.
            waited = tasks or {asyncio.create_task(asyncio.sleep(WATCH_SECONDS))}
            _, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            tasks = waited if tasks else set()
            if not await self._is_closed():
                continue
            try:
                server, _ = self._listening(self.port)
            except ConfigError:  # such as for want of a descriptor, which is why the port seemed to be closed
                tasks = set()
                continue
            _log.warning("A malformed call has closed the gRPC port, which is opened again. Calls that run go on.")
            self._let_end(self._server)
            self._server = server
            tasks = await _started(self._server)

    async def _is_closed(self) -> bool:
        """Return whether the port is closed or closes shortly."""
        for seconds in _CLOSING_SECONDS:
            await asyncio.sleep(seconds)
            if not await self._is_held():
                return True
        return False

    def _let_end(self, server: Any) -> None:
        """Keep a server that takes no calls until its last one has ended."""

        async def wait() -> None:
            with suppress(UnicodeDecodeError):  # what had ended it
                await server.wait_for_termination()
            self._ended.discard(server)

        self._ended.add(server)
        self._waits.add(task := asyncio.create_task(wait()))
        task.add_done_callback(self._waits.discard)

    async def _is_held(self) -> bool:
        """Return whether a socket listens on the port, to which no other one can then be bound. Takes no connection."""
        loop, host = asyncio.get_running_loop(), self._state.options.host
        try:
            found = await loop.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)
        except OSError:  # The name of the host is not known now: a server could not be opened on it either.
            return True
        for family, kind, _, _, address in found:
            try:
                with socket.socket(family, kind) as other:
                    # So connections of a server that has ended do not count.
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    other.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
        return False


async def _started(server: Any) -> set[asyncio.Task[Any]]:
    """Start a server, and return the tasks that have begun meanwhile: the one that takes its calls is among them."""
    before = asyncio.all_tasks()
    await server.start()
    return asyncio.all_tasks() - before


def _listen(server: Any, address: str, options: ServerConfig) -> int:
    if options.ssl_certfile is None:
        return int(server.add_insecure_port(address))
    certificate = Path(options.ssl_certfile).read_bytes()
    key = Path(options.ssl_keyfile or options.ssl_certfile).read_bytes()
    roots = None if options.ssl_ca_certs is None else Path(options.ssl_ca_certs).read_bytes()
    credentials = grpc.ssl_server_credentials([(key, certificate)], roots, options.ssl_cert_reqs == 2)
    return int(server.add_secure_port(address, credentials))


class _Pools:
    """Descriptors of our messages, and of the health service's, for reflection."""

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


def _generation(service: GenerationService) -> Any:
    kind = message("rootgraft.v1.GenerateRequest")
    return grpc.method_handlers_generic_handler(
        generation_service.NAME,
        {
            "GenerateUnary": _unary(kind, service.unary),
            "Generate": grpc.unary_stream_rpc_method_handler(
                _streaming(kind, service.stream), response_serializer=_serialized
            ),
        },
    )


def _inference(service: InferenceService) -> Any:
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
    return grpc.method_handlers_generic_handler(inference_service.NAME, handlers)


def _health(calls: AppCalls) -> Any:
    """Return the handlers of gRPC's health service, which tells what ``/health/ready`` does."""
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

    return grpc.method_handlers_generic_handler(
        HEALTH,
        {
            "Check": _unary(kind, check),
            "Watch": grpc.unary_stream_rpc_method_handler(_streaming(kind, watch), response_serializer=_serialized),
        },
    )


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
    """Return a message. Raises CallError, as gRPC itself answers malformed ones with an internal error."""
    try:
        return kind.FromString(data)
    except DecodeError:
        name = kind.DESCRIPTOR.full_name
        raise CallError(grpc.StatusCode.INVALID_ARGUMENT, f"The message is no {name}.") from None


async def _abort(context: Any, error: CallError | CapacityError) -> None:
    if isinstance(error, CapacityError):  # no thread for a large message now
        error = CallError(grpc.StatusCode.UNAVAILABLE, str(error))
    await context.abort(error.status, error.message, error.trailers)


def _serialized(answer: Any) -> bytes:
    data: bytes = answer.SerializeToString()
    return data
