"""What is wrong with a cluster is said in one line before a replica is started; a server without Ray imports none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from support.machine.waits import HANG_SECONDS

from rootgraft.api.config import ServerConfig
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.machine.visible_gpus import VARIABLE
from rootgraft.fleet.on_ray import ray_cluster
from rootgraft.fleet.on_ray.cluster_room import GIB, ReplicaResources, check_room
from rootgraft.fleet.on_ray.ray_cluster import RayCluster, check_address, check_ray
from rootgraft.fleet.on_ray.ray_fleet import ray_fleet, resources_of
from rootgraft.fleet.on_ray.ray_launcher import RayLauncher

SMALL = ReplicaResources(num_cpus=2, num_gpus=0, memory=GIB)


def test_replicas_fit_machine_by_machine() -> None:
    machines = [{"CPU": 3.0, "memory": 9.0 * GIB}, {"CPU": 5.0, "memory": 1.5 * GIB}, {"memory": 9.0 * GIB}]
    check_room(machines, SMALL, 2)  # one in each: of the 8 cores, 2 are of no use
    with pytest.raises(ConfigError, match=r"3 replicas of 2 CPU, 1.00 GiB each .* room for 2: 3 machines with 8 CPU"):
        check_room(machines, SMALL, 3)
    with pytest.raises(ConfigError, match="room for 0: 0 machines"):
        check_room([], SMALL, 1)


def test_gpus_are_counted() -> None:
    wanted = ReplicaResources(num_cpus=1, num_gpus=1, memory=0)
    check_room([{"CPU": 8.0, "GPU": 2.0}], wanted, 2)
    with pytest.raises(ConfigError, match="1 machine with 8 CPU, 2 GPU"):
        check_room([{"CPU": 8.0, "GPU": 2.0}], wanted, 3)
    with pytest.raises(ConfigError, match="room for 0"):
        check_room([{"CPU": 8.0}], wanted, 1)


@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_of_a_replica_are_on_one_machine(option: str, tmp_path: Path) -> None:
    """Two machines with a GPU each have no room for a replica of two ranks, and the refusal says why."""
    wanted = resources_of(EngineConfig(device="cuda", **{option: 2}), tmp_path, has_gpu=True)
    check_room([{"CPU": 8.0, "GPU": 2.0}], wanted, 1)
    with pytest.raises(ConfigError, match=r"room for 0: 2 machines .* All 2 ranks of a replica must run on one"):
        check_room([{"CPU": 8.0, "GPU": 1.0}] * 2, wanted, 1)


def test_a_replica_takes_its_weights_and_its_kv(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    config = EngineConfig(threads=3, kv_cache_memory=0.25, device="cpu")
    assert resources_of(config, tmp_path, has_gpu=False) == ReplicaResources(3, 0, 2000 + GIB // 4)
    ranks = replace(config, tensor_parallel_size=2)
    assert resources_of(ranks, tmp_path, has_gpu=True) == ReplicaResources(6, 2, 2000 + GIB // 2, num_ranks=2)
    assert resources_of(EngineConfig(), tmp_path / "a.safetensors", has_gpu=True) == ReplicaResources(1, 1, 1000)


def test_replicas_of_a_local_ray_take_gpus_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of this machine without Ray do; Ray itself then shows each replica those that it has been given."""
    monkeypatch.setenv(VARIABLE, "4,5,6,7")
    monkeypatch.setattr(metadata, "version", lambda name: "2.60.3")
    config = EngineConfig(device="cuda", tensor_parallel_size=2)
    fleet = ray_fleet(config, tmp_path, ServerConfig(replicas=2, ray_address="local").fleet_options)
    assert isinstance(fleet._launcher, RayLauncher)
    assert fleet._launcher._resources.as_options()["num_gpus"] == 2
    assert fleet._launcher._config.gpu_memory_utilization == config.gpu_memory_utilization
    with pytest.raises(ConfigError, match=r"--replicas 3: each replica needs 2 GPUs .* 4 can be seen .* at most 2,"):
        ray_fleet(config, tmp_path, ServerConfig(replicas=3, ray_address="local").fleet_options)
    several_models = ray_fleet(config, tmp_path, ServerConfig(ray_address="local").fleet_options, 2)
    assert isinstance(several_models._launcher, RayLauncher)
    assert several_models._launcher._resources.num_gpus == 0, "they share the first GPUs"
    assert several_models._launcher._config.gpu_memory_utilization < config.gpu_memory_utilization


@pytest.mark.parametrize("address", ["local", "auto", "10.0.0.1:6379", "head:1", "[::1]:65535"])
def test_addresses(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    "address", ["", "head", ":6379", "head:", "head:0", "head:65536", "head:x", "ray://head:10001"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="local, auto, or HOST:PORT"):
        check_address(address)


def test_a_ray_that_is_missing_or_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"not installed\. Try: .* -m pip install 'rootgraft\[fleet\]'"):
        check_ray()
    monkeypatch.setattr(metadata, "version", lambda name: "2.61.0")
    with pytest.raises(ConfigError, match=r"ray 2\.60, but 2\.61\.0 is installed"):
        check_ray()
    monkeypatch.setattr(metadata, "version", lambda name: "2.60.3")
    check_ray()


async def test_a_cluster_that_nobody_listens_for_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    cluster = RayCluster(address, SMALL, 1, 1)
    with pytest.raises(ConfigError, match=rf"--ray-address {address}: the cluster cannot be reached"):
        await cluster.start()
    await cluster.close()


async def test_a_machine_that_is_too_small_is_named() -> None:
    cluster = RayCluster("local", ReplicaResources(1, 0, 1 << 50), 2, 2)
    with pytest.raises(ConfigError, match=r"2 replicas of 1 CPU, 1048576\.00 GiB each do not fit"):
        await cluster.start()
    await cluster.close()


def test_what_a_killed_server_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    names = (f"rootgraft-ray-{ended.pid}-a", f"rootgraft-ray-{os.getpid()}-b", "x")
    old, own, other = (tmp_path / name for name in names)
    for folder in (old, own, other):
        folder.mkdir()
    code = "import time; print('runs', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, str(old / "socket")], stdout=subprocess.PIPE) as left:
        try:
            assert left.stdout is not None and left.stdout.readline() == b"runs\n"  # its command line is there by now
            ray_cluster.remove_old_sessions()
            assert left.wait(HANG_SECONDS) < 0
        finally:
            left.kill()
    assert not old.exists() and own.exists() and other.exists()


def test_a_server_with_ray_imports_none_before_its_start() -> None:
    code = (
        "import sys; from pathlib import Path; from rootgraft.fleet.on_ray import ray_launcher, ray_fleet;"
        "print([name for name in sys.modules if name.split('.')[0] == 'ray'])"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_the_option_is_none_by_default() -> None:
    assert ServerConfig().ray_address is None


@pytest.mark.parametrize("address", ["auto", "head:6379"])
def test_a_cluster_is_told_what_its_replicas_compute_on(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.60.0")
    with pytest.raises(ConfigError, match="--device is auto; with --ray-address it must be cpu or cuda"):
        ray_fleet(EngineConfig(), Path("m"), ServerConfig(ray_address=address).fleet_options)
    with pytest.raises(
        ConfigError, match="--hf-overrides creates a folder on this machine that the other nodes of --ray-address"
    ):
        ray_fleet(
            EngineConfig(device="cpu", hf_overrides='{"a": 1}'),
            Path("m"),
            ServerConfig(ray_address=address).fleet_options,
        )
