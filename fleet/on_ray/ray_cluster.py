"""Ray cluster: joins one, or starts a local one that only this machine's loopback interface and this server can use."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from ...engine.errors import ConfigError
from .cluster_room import ReplicaResources, check_room
from .ray_services import START_SECONDS, change_services

LOCAL = "local"
AUTO = "auto"
VERSIONS = (2, 60)
"""Major and minor version of Ray that this was written for."""

OBJECT_STORE_BYTES = 80 << 20
"""Size of Ray's object store: nearly the smallest that Ray accepts, because no part of a request goes through it."""

REACH_SECONDS = 3.0

# Prefix of the folders of a local cluster's sessions; the process id of the cluster's server follows.
_FOLDER = "rootgraft-ray-"

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    # Setting by which Ray listens on the loopback interface only; its name means "this machine is not a cluster".
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Replicas of several models share the machine's GPUs: an actor that requests none may still use them.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # If an actor is killed, its engine process is killed too.
    "RAY_process_group_cleanup_enabled": "true",
    # Statistics that Ray's agent would collect, which are not used here.
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "RAY_DASHBOARD_AGENT_LOOP_MONITOR_INTERVAL_S": "10",
}
_LOCAL_SYSTEM = {
    "raylet_report_resources_period_milliseconds": 1000,
    "enable_metrics_collection": False,
    "gcs_pull_resource_loads_period_milliseconds": 30_000,
    "kill_idle_workers_interval_ms": 5000,
    "raylet_check_gc_period_milliseconds": 5000,
    "io_context_event_loop_lag_collection_interval_ms": 30_000,
    "task_events_report_interval_ms": 0,
    # Time limit of the agent of runtime environments and of actors, whose processes start late on a busy machine.
    "agent_register_timeout_ms": int(1e3 * START_SECONDS),
    "worker_register_timeout_seconds": int(START_SECONDS),
    # With the default, Ray would start a process for each core, and would answer only when all of them have started.
    # Actors need only a few processes.
    "prestart_worker_first_driver": False,
    # Otherwise Ray would kill a process when memory is short; the replicas' options limit their memory.
    "memory_monitor_refresh_ms": 0,
}

logger = logging.getLogger("rootgraft.fleet")


def check_ray() -> None:
    """Check that Ray is installed in a supported version. Raises ConfigError with the command that fixes it."""
    command = f"Try: {sys.executable} -m pip install 'rootgraft[fleet]'"
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"--ray-address needs the package ray, which is not installed. {command}") from None
    if tuple(int(part) for part in version.split(".")[:2]) != VERSIONS:
        wanted = ".".join(map(str, VERSIONS))
        raise ConfigError(f"--ray-address needs ray {wanted}, but {version} is installed. {command}")


def check_address(address: str) -> None:
    """Check the format of ``--ray-address``. Raises ConfigError."""
    if address in (LOCAL, AUTO):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--ray-address is {address!r}; it must be local, auto, or HOST:PORT of a cluster's head.")


class RayCluster:
    """A fleet's view of a cluster: the connection of this process, which is shared with the fleets of other models.

    Args:
        address: ``local``, ``auto``, or HOST:PORT.
        resources: resources of each replica.
        count: number of replicas that must fit.
        most_replicas: largest number of replicas of all fleets of this process together.
    """

    def __init__(self, address: str, resources: ReplicaResources, count: int, most_replicas: int) -> None:
        self._address = address
        self._resources = resources
        self._count = count
        self._most_replicas = most_replicas
        self._lock = asyncio.Lock()
        self._is_joined = False

    @property
    def ray(self) -> Any:
        """The package ``ray``, connected to the cluster."""
        return _CONNECTION.ray

    async def start(self) -> None:
        """Connect, once. Raises ConfigError if Ray cannot be reached or started, or has no room for the replicas."""
        async with self._lock:
            if not self._is_joined:
                await asyncio.to_thread(self._join)

    async def close(self) -> None:
        """Leave the cluster; with the last fleet the process disconnects, and a local cluster ends."""
        async with self._lock:
            if self._is_joined:
                self._is_joined = False
                await asyncio.to_thread(_CONNECTION.leave)

    def _join(self) -> None:
        if self._address == LOCAL:
            # A replica that replaces one that drains waits for its GPUs, but not for its cores.
            machine = {
                "CPU": self._count * self._resources.num_cpus,
                "GPU": self._count * self._resources.num_gpus,
                "memory": psutil.virtual_memory().available,
            }
            check_room([machine], self._resources, self._count)
        wanted = self._resources
        _CONNECTION.join(self._address, self._most_replicas * wanted.num_cpus, self._most_replicas * wanted.num_gpus)
        try:
            if self._address != LOCAL:
                machines = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
                check_room(machines, self._resources, self._count)
        except BaseException:
            _CONNECTION.leave()
            raise
        self._is_joined = True


class _Connection:
    """The connection of this process to a cluster. Ray allows one per process; it is open while a fleet uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._address = ""
        self._ray: Any = None
        self._folder: Path | None = None

    @property
    def ray(self) -> Any:
        assert self._ray is not None
        return self._ray

    def join(self, address: str, num_cpus: int, num_gpus: int) -> None:
        """Connect, or use the existing connection.

        Args:
            num_cpus, num_gpus: number of CPUs and GPUs for a local cluster. If there are GPUs, each replica sees its
                own alone; else all replicas see all of them.

        Raises:
            ConfigError: Ray cannot be reached or started, or another model uses another address.
        """
        with self._lock:
            if self._ray is None:
                self._address = address
                self._connect(num_cpus, num_gpus)
            elif address != self._address:
                raise ConfigError(
                    f"--ray-address {address}: another model uses {self._address}, and a server can use only one "
                    "cluster. Use the same address."
                )
            self._users += 1

    def leave(self) -> None:
        """Disconnect, unless other fleets use the connection; a local cluster ends."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._disconnect()

    def _disconnect(self) -> None:
        if self._ray is not None:
            self._ray.shutdown()
            self._ray = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _connect(self, num_cpus: int, num_gpus: int) -> None:
        try:
            if self._address == LOCAL:
                self._init(**self._local(num_cpus, num_gpus))
                self._end_idle_processes()
                return
            if self._address != AUTO:
                _reach(self._address)
            self._init(address=self._address)
        except BaseException:
            self._disconnect()
            raise

    def _local(self, num_cpus: int, num_gpus: int) -> dict[str, Any]:
        """Return the options of a cluster of this machine alone, and set the environment variables that Ray reads."""
        remove_old_sessions()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        os.environ.update(_ENVIRONMENT)
        # The token is set only once in a process, as Ray keeps the first value that it has read.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        return {
            "address": LOCAL,
            # Ray counts as many CPUs as the replicas need. It must not count the machine's cores, which the fleets
            # divide among themselves.
            "num_cpus": 2 * num_cpus,
            "num_gpus": num_gpus or None,
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "_memory": psutil.virtual_memory().available,
            "_temp_dir": str(self._folder),
            "_system_config": dict(_LOCAL_SYSTEM),
        }

    def _end_idle_processes(self) -> None:
        """End Ray's processes that a cluster of one machine does not need; together they use 1.8 % of a core."""
        worker: Any = importlib.import_module("ray._private.worker")
        node = worker._global_node
        for end in (node.kill_log_monitor, node.kill_monitor):
            end(check_alive=False)

    def _init(self, **options: Any) -> None:
        # Otherwise Ray would print a stack trace for each SIGTERM, at which this server shuts down in order.
        os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
        ray = importlib.import_module("ray")
        # The import of Ray sets the level, so it is changed after the import.
        logging.getLogger("ray").setLevel(logging.ERROR)
        # Otherwise Ray would print that an actor died, regardless of ``log_to_driver``; the fleet reports it too.
        worker: Any = importlib.import_module("ray._private.worker")
        worker.print_to_stdstream = lambda *given, **named: None
        change_services(is_local=self._address == LOCAL)
        try:
            ray.init(
                **options,
                namespace="rootgraft",
                job_config=_job_config(),
                configure_logging=False,
                log_to_driver=False,
            )
        except Exception as error:  # Ray has no common root for what may happen here
            ray.shutdown()
            where = "A local Ray cannot be started" if self._address == LOCAL else "The cluster cannot be joined"
            text = " ".join(str(error).split())[:300] or type(error).__name__
            raise ConfigError(f"--ray-address {self._address}: {where}: {text}") from error
        self._ray = ray


_CONNECTION = _Connection()


def remove_old_sessions() -> None:
    """Remove the folders of local clusters whose servers have ended, and end their remaining processes."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        owner = folder.name.removeprefix(_FOLDER).partition("-")[0]
        with suppress(OSError):
            if owner.isdecimal() and not psutil.pid_exists(int(owner)) and folder.stat().st_uid == os.getuid():
                _end_processes_of(folder)
                shutil.rmtree(folder, ignore_errors=True)


def _end_processes_of(folder: Path) -> None:
    """Kill our processes that were started for a session's folder, whose name is in their arguments."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid() and any(str(folder) in part for part in process.cmdline()):
                logger.warning("ending a process of an earlier server's Ray: %d", process.pid)
                process.kill()


def _reach(address: str) -> None:
    """Check that a process listens at a cluster's address. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise ConfigError(f"--ray-address {address}: the cluster cannot be reached: {error}") from error


def _job_config() -> Any:
    """Return job options with which workers do not search this process's working directory for modules."""
    job_config = importlib.import_module("ray.job_config").JobConfig()
    # Otherwise Ray would add it, and the folder of this process's script, unless the job has its own directory.
    job_config._runtime_env_has_working_dir = lambda: True
    return job_config
