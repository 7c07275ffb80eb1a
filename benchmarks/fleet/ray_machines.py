"""Machines of a Ray cluster, all of them on this one, to be taken out: ``ray.cluster_utils``.

Ray listens on all interfaces, so that this belongs in a network namespace of its own: ``unshare -n python -m ...``.
"""

from __future__ import annotations

import fcntl
import importlib
import socket
import struct
from types import TracebackType
from typing import Any, Self

_OBJECT_STORE_BYTES = 80 << 20


def raise_loopback() -> None:
    """Bring the loopback interface of this network namespace up. Raises PermissionError where that is not allowed."""
    flags_of, set_flags, is_up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        request = struct.pack("16sh14s", b"lo", 0, b"")
        _, flags, _ = struct.unpack("16sh14s", fcntl.ioctl(end, flags_of, request))
        if not flags & is_up:
            fcntl.ioctl(end, set_flags, struct.pack("16sh14s", b"lo", flags | is_up, b""))


class RayMachines:
    """A cluster with a head that takes no replicas, and machines with room for one replica each, for a block of code.

    Args:
        count: of the machines.
        memory: bytes that each has for its replica.

    Attributes:
        address: of the head.
    """

    def __init__(self, count: int, memory: int = 1 << 30) -> None:
        self._count = count
        self._memory = memory
        self._cluster: Any = None
        self._machines: list[Any] = []

    def __enter__(self) -> Self:
        raise_loopback()
        head = {"num_cpus": 0, "object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
        module = importlib.import_module("ray.cluster_utils")
        self._cluster = module.Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        for _ in range(self._count):
            self.add()
        # Ray sets signal handlers with each machine, which only the main thread may. Later ones end with the head.
        self._cluster._shutdown_at_exit = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cluster.shutdown()

    def add(self) -> None:
        """Add a machine, from any thread, and wait until the cluster has it. Raises TimeoutError."""
        room = {"num_cpus": 1, "memory": self._memory, "object_store_memory": _OBJECT_STORE_BYTES}
        self._machines.append(self._cluster.add_node(**room))

    def remove(self, place: int) -> None:
        """Kill all of Ray's processes of a machine, and with them the replica's."""
        self._cluster.remove_node(self._machines.pop(place % len(self._machines)), allow_graceful=False)
