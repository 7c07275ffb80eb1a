"""Replica actor: the process in which Ray hosts a replica's engine process. Runs in a Ray worker."""

from __future__ import annotations

import importlib

from .handover import EngineHost


class ReplicaActor:
    """The host of one replica on a machine of the cluster. Made through ``ray.remote``; Ray does not restart it.

    Args:
        token: token of connections; see ``EngineHost``.
    """

    def __init__(self, token: bytes) -> None:
        self._address: str = importlib.import_module("ray.util").get_node_ip_address()
        self._host = EngineHost(self._address, token)

    def address(self) -> tuple[str, int]:
        """Return the host and port at which the replica waits for the gateway to connect."""
        return self._address, self._host.port

    def run(self, model_path: str, options: str) -> int:
        """Run the engine process; see ``EngineHost.run``."""
        return self._host.run(model_path, options)
