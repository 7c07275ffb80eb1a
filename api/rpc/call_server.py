"""Call server: grpcio's asynchronous server, made robust against malformed method names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

# Private names of grpcio. pyproject.toml pins the version that has them: with another version this import fails.
from grpc._cython.cygrpc import AioServer, _handle_rpc, _MethodResolver, _schedule_rpc_coro, get_working_loop
from grpc.aio._server import Server

UNKNOWN = "/"  # No method has this name. The library answers all calls of unknown methods under it.


class _CallTaker(AioServer):  # type: ignore[misc]  # grpcio has no types
    """Answers calls of methods that are not registered, which otherwise a task of the library answers.

    That task decodes the method's name as UTF-8, and ends if this fails. So a single call, even without a key, would
    close the port for all clients, and the running calls could then end the process. Names of registered methods are
    compared as bytes.
    """

    async def _request_call(self) -> Any:
        """Answer such calls until the server ends; then raise the exception that the library expects."""
        loop = asyncio.get_running_loop()
        answers: set[asyncio.Task[Any]] = set()
        while True:
            call = await super()._request_call()
            resolver = _MethodResolver([], {})
            answer = _handle_rpc(UNKNOWN, resolver, (), call, loop, False)
            answers.add(task := loop.create_task(_schedule_rpc_coro(answer, call, loop, UNKNOWN)))
            task.add_done_callback(answers.discard)


class CallServer(Server):  # type: ignore[misc]  # grpcio has no types
    """A server of registered methods. Belongs to the running event loop.

    Args:
        interceptors: interceptors for the calls of registered methods.
        options: options of gRPC's core, by name.
    """

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Mapping[str, int]) -> None:
        self._loop = get_working_loop()
        self._server = _CallTaker(self._loop, None, (), tuple(interceptors), tuple(options.items()), None)
