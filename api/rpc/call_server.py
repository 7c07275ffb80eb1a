"""Call server: grpcio's asynchronous server, which a malformed name of a method does not end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

# Private names of grpcio, which pyproject.toml holds to the version that has them so: of another one the import fails.
from grpc._cython.cygrpc import AioServer, _handle_rpc, _MethodResolver, _schedule_rpc_coro, get_working_loop
from grpc.aio._server import Server

UNKNOWN = "/"  # no method of ours: the name under which the library answers all calls that are of none


class _CallTaker(AioServer):  # type: ignore[misc]  # grpcio has no types
    """Answers calls of methods that are not registered, instead of giving them to the library's task.

    That task decodes a name as UTF-8 and ends at other bytes: one call without a key closes the port for everybody,
    and what it leaves of the calls that run can end the process. Names of registered methods are compared as bytes.
    """

    async def _request_call(self) -> Any:
        """Take and answer such calls until the server ends, which raises what the library expects."""
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
