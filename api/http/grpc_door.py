"""The gRPC server beside the HTTP server, where ``--grpc-port`` asks for it and grpcio is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from ...engine.errors import ConfigError
from ..config import ServerConfig

if TYPE_CHECKING:
    from ..rpc.rpc_server import RpcServer


def open_rpc(app: ASGIApp, options: ServerConfig) -> RpcServer | None:
    """Return the gRPC server of an application, which listens already; None without ``--grpc-port``.

    Raises:
        ConfigError: grpcio is missing, or the port cannot be used.
    """
    if options.grpc_port is None:
        return None
    try:
        from ..rpc.rpc_server import RpcServer
    except ImportError as error:
        raise ConfigError(f"--grpc-port needs gRPC ({error}): pip install 'rootgraft[grpc]'") from None
    return RpcServer(app, options, options.grpc_port)
