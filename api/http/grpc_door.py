"""gRPC server: opens it in addition to the HTTP server if ``--grpc-port`` is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from ...engine.errors import ConfigError
from ..generate.server_state import ServerState
from .descriptors import set_aside

if TYPE_CHECKING:
    from ..rpc.rpc_server import RpcServer


def open_rpc(app: ASGIApp, state: ServerState) -> RpcServer | None:
    """Create the gRPC server of an application. It already listens. Returns None without ``--grpc-port``.

    Raises:
        ConfigError: grpcio is not installed, or the port cannot be used.
    """
    port = state.options.grpc_port
    if port is None:
        return None
    try:
        from ..rpc.rpc_server import MAX_CONNECTIONS, RpcServer
    except ImportError as error:
        raise ConfigError(f"--grpc-port needs gRPC ({error}): pip install 'rootgraft[grpc]'") from None
    return RpcServer(app, state, port, set_aside(MAX_CONNECTIONS))
