"""Main spawn: starts gateway processes by forking a process that has imported their modules.

Importing the modules of a gateway takes one to two seconds of a core. A forked gateway serves in a fraction of that
time. So replacing a lost gateway takes little processor time from the other gateways and the engines.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Protocol

from ...engine.serving.fork_server import ForkedProcess, ForkServer

GatewayProcess = subprocess.Popen[bytes] | ForkedProcess


class GatewaySpawn(Protocol):
    """Interface of an object that starts gateway processes."""

    async def spawn(self, listening: int, link: int) -> GatewayProcess:
        """Start a gateway with the descriptors of the listening socket and of the gateway's end of the link.

        Raises OSError.
        """
        ...

    def close(self) -> None:
        """End the process from which gateways are forked. The gateways continue."""
        ...


class ForkedGateways:
    """Forks gateways, or starts them directly if forking is not possible. Belongs to one event loop."""

    def __init__(self) -> None:
        self._server = ForkServer("rootgraft.api.http.gateway_process")

    async def spawn(self, listening: int, link: int) -> GatewayProcess:
        await self._server.start()
        return self._server.fork((listening, link)) or _start(listening, link)

    def close(self) -> None:
        self._server.close()


def _start(listening: int, link: int) -> subprocess.Popen[bytes]:
    numbers = map(str, (listening, link, os.getpid()))
    command = [sys.executable, "-P", "-m", "rootgraft.api.http.gateway_process", *numbers]
    return subprocess.Popen(command, pass_fds=[listening, link], stdin=subprocess.DEVNULL)
