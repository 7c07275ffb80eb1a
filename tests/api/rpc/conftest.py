"""Fixtures of this folder: a gRPC server on the fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.api.api_live import Live
from support.api.rpc_live import RpcClient, rpc_of


@pytest.fixture(scope="session")
def session_rpc(session_live: Live) -> Iterator[RpcClient]:
    with rpc_of(session_live) as client:
        yield client


@pytest.fixture
def rpc(session_rpc: RpcClient, live: Live) -> RpcClient:
    return session_rpc
