"""Replicas on GPUs: each has one to itself, or the start says that there are too few."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from support.engine.core_client import CoreClient

from rootgraft.api.config import ServerConfig
from rootgraft.api.http.model_service import engine_of
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError, EngineDead
from rootgraft.engine.machine import visible_gpus as gpus
from rootgraft.engine.serving import engine_spawn
from rootgraft.fleet import gpu_launcher
from rootgraft.fleet.fleet import Fleet
from rootgraft.fleet.gpu_launcher import GpuLauncher, gpus_of
from rootgraft.fleet.replica_launcher import ProcessLauncher

CUDA = EngineConfig(device="cuda")


@pytest.mark.parametrize(
    ("value", "found"),
    [("0,1", ("0", "1")), ("3", ("3",)), ("", ()), ("-1", ()), ("1,-1,0", ("1",)), ("GPU-ab, 2", ("GPU-ab", "2"))],
)
def test_the_variable_names_the_gpus(monkeypatch: pytest.MonkeyPatch, value: str, found: tuple[str, ...]) -> None:
    monkeypatch.setenv(gpus.VARIABLE, value)
    assert gpus.visible_gpus() == found


def test_device_files_count_without_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(gpus.VARIABLE, raising=False)
    for name in ("nvidia0", "nvidia7", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus.visible_gpus(tmp_path) == ("0", "1")


def test_each_replica_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VARIABLE, "4,5,6")
    assert gpus_of(CUDA, ServerConfig(replicas=2).fleet_options, 2) == ("4", "5")
    assert gpus_of(CUDA, ServerConfig(autoscale="1:3").fleet_options, 3) == ("4", "5", "6")
    assert gpus_of(EngineConfig(device="cpu"), ServerConfig(replicas=4).fleet_options, 4) == ()
    assert gpus_of(CUDA, ServerConfig(replicas=2).fleet_options, 5) == (), "several models"
    fleet = engine_of(CUDA, Path("m"), ServerConfig(replicas=3))
    assert isinstance(fleet, Fleet) and isinstance(fleet._launcher, GpuLauncher)


def test_each_replica_has_the_gpus_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VARIABLE, "4,5,6,7,8")
    ranks = EngineConfig(device="cuda", tensor_parallel_size=2)
    assert gpus_of(ranks, ServerConfig(replicas=2).fleet_options, 2) == ("4,5", "6,7")
    with pytest.raises(ConfigError, match=r"--replicas 3: each replica needs 2 GPUs .* 5 can be seen .* at most 2,"):
        gpus_of(ranks, ServerConfig(replicas=3).fleet_options, 3)


def test_a_torch_for_cpus_takes_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VARIABLE, "0,1")
    for takes, found in ((True, ("0", "1")), (False, ())):
        monkeypatch.setattr(gpu_launcher, "torch_takes_gpus", lambda takes=takes: takes)
        assert gpus_of(EngineConfig(), ServerConfig(replicas=2).fleet_options, 2) == found


@pytest.mark.parametrize(
    ("options", "named"), [({"replicas": 3}, "--replicas 3"), ({"autoscale": "0:3"}, "--autoscale 0:3")]
)
def test_too_few_gpus_are_told_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], named: str
) -> None:
    monkeypatch.setenv(gpus.VARIABLE, "0,1")
    with pytest.raises(ConfigError, match=rf"^{named}: .* but 2 can be seen .*: use at most 2, or --device cpu\.$"):
        engine_of(CUDA, Path("m"), ServerConfig(**options))  # type: ignore[arg-type]


async def test_a_gpu_is_used_again_once_its_replica_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_launcher, "FREE_SECONDS", 0.05)
    made: list[str] = []
    fails: set[str] = set()

    def make(gpu: str) -> CoreClient:
        made.append(gpu)
        return CoreClient(fails=EngineDead("no") if gpu in fails else None)

    launcher = GpuLauncher({gpu: ProcessLauncher(lambda gpu=gpu: make(gpu)) for gpu in ("a", "b")})
    (one, _), (_other, _) = await launcher.launch(), await launcher.launch()
    assert made == ["a", "b"]
    with pytest.raises(EngineDead, match="All 2 GPUs are in use"):
        await launcher.launch()
    monkeypatch.setattr(gpu_launcher, "FREE_SECONDS", 60.0)
    waiting = asyncio.create_task(launcher.launch())
    await launcher.stop(one)
    third, _ = await waiting
    assert made == ["a", "b", "a"]
    await launcher.stop(third)
    fails.add("a")
    with pytest.raises(EngineDead, match="no"):
        await launcher.launch()
    fails.clear()
    await launcher.launch()
    assert made[3:] == ["a", "a"]


def test_an_engine_process_sees_its_gpu_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seen by a stand-in for the interpreter, which says what it finds in its environment."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"open({str(tmp_path / 'seen')!r}, 'w').write(json.dumps(os.environ.get('CUDA_VISIBLE_DEVICES')))\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(engine_spawn.sys, "executable", str(script))
    monkeypatch.setenv(gpus.VARIABLE, "4,5")
    for gpu, seen in (("5", "5"), (None, "4,5")):
        engine_spawn.spawn_engine(0, 1, "m", "{}", gpu).wait()
        assert json.loads((tmp_path / "seen").read_text()) == seen
