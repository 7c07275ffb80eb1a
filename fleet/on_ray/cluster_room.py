"""Room of a cluster: whether the wanted replicas fit on its machines. No Ray, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...engine.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ReplicaResources:
    """Resources that a replica needs on a machine.

    Attributes:
        num_cpus: number of cores, at least one.
        num_gpus: number of GPUs.
        memory: least number of bytes of memory, for weights and KV.
        num_ranks: number of ranks of a model on several devices, which have all of these together.
    """

    num_cpus: int
    num_gpus: int
    memory: int
    num_ranks: int = 1

    def __str__(self) -> str:
        gpus = f", {self.num_gpus} GPU" if self.num_gpus else ""
        return f"{self.num_cpus} CPU{gpus}, {self.memory / GIB:.2f} GiB"

    def as_options(self) -> dict[str, Any]:
        """Return the resources as options of an actor that Ray does not restart: the fleet starts another one."""
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "memory": self.memory,
            "max_restarts": 0,
            "max_task_retries": 0,
        }


def check_room(machines: Iterable[Mapping[str, float]], wanted: ReplicaResources, count: int) -> None:
    """Check that ``count`` replicas fit on the machines.

    Args:
        machines: resources of each machine under Ray's names: CPU, GPU, memory.

    Raises:
        ConfigError: the replicas do not fit; the message names the resources of the cluster.
    """
    machines = list(machines)
    room = sum(_fitting(machine, wanted) for machine in machines)
    if room >= count:
        return
    sums = {name: sum(machine.get(name, 0.0) for machine in machines) for name in ("CPU", "GPU", "memory")}
    gpus = f", {sums['GPU']:g} GPU" if wanted.num_gpus else ""
    ranks = f" All {wanted.num_ranks} ranks of a replica must run on one machine." if wanted.num_ranks > 1 else ""
    raise ConfigError(
        f"--replicas: {count} replicas of {wanted} each do not fit into the cluster, which has room for {room}: "
        f"{len(machines)} machine{'s' * (len(machines) != 1)} with {sums['CPU']:g} CPU{gpus}, "
        f"{sums['memory'] / GIB:.2f} GiB.{ranks} Use fewer replicas, or smaller ones with --threads and "
        "--kv-cache-memory."
    )


def _fitting(machine: Mapping[str, float], wanted: ReplicaResources) -> int:
    """Return the number of replicas that fit on a machine."""
    needs = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus, "memory": wanted.memory}
    return min(int(machine.get(name, 0.0) // need) for name, need in needs.items() if need)
