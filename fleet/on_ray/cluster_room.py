"""Room of a cluster: whether the replicas that are wanted fit its machines. No Ray, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...engine.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ReplicaResources:
    """What a replica takes of a machine.

    Attributes:
        num_cpus: cores, at least one.
        num_gpus: GPUs.
        memory: bytes that it takes at least: weights and KV.
    """

    num_cpus: int
    num_gpus: int
    memory: int

    def __str__(self) -> str:
        gpus = f", {self.num_gpus} GPU" if self.num_gpus else ""
        return f"{self.num_cpus} CPU{gpus}, {self.memory / GIB:.2f} GiB"

    def as_options(self) -> dict[str, Any]:
        """Return them as options of an actor, which Ray does not restart: the fleet starts another one."""
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "memory": self.memory,
            "max_restarts": 0,
            "max_task_retries": 0,
        }


def check_room(machines: Iterable[Mapping[str, float]], wanted: ReplicaResources, count: int) -> None:
    """Check that ``count`` replicas fit.

    Args:
        machines: resources of each by Ray's names: CPU, GPU, memory.

    Raises:
        ConfigError: they do not; it says what there is.
    """
    machines = list(machines)
    room = sum(_fitting(machine, wanted) for machine in machines)
    if room >= count:
        return
    sums = {name: sum(machine.get(name, 0.0) for machine in machines) for name in ("CPU", "GPU", "memory")}
    gpus = f", {sums['GPU']:g} GPU" if wanted.num_gpus else ""
    raise ConfigError(
        f"--replicas: {count} replicas of {wanted} each do not fit the cluster, which has room for {room}: "
        f"{len(machines)} machine{'s' * (len(machines) != 1)} with {sums['CPU']:g} CPU{gpus}, "
        f"{sums['memory'] / GIB:.2f} GiB. Take fewer replicas, or less for each with --threads and --kv-cache-memory."
    )


def _fitting(machine: Mapping[str, float], wanted: ReplicaResources) -> int:
    """Return how many replicas fit a machine."""
    needs = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus, "memory": wanted.memory}
    return min(int(machine.get(name, 0.0) // need) for name, need in needs.items() if need)
