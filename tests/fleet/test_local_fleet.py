"""`serve --replicas`: what each replica gets of the machine; a server without it imports nothing of a fleet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.engine.core_client import CoreClient

from rootgraft.api.config import ServerConfig
from rootgraft.api.http.model_service import engine_of
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.fleet.fleet import Fleet
from rootgraft.fleet.local_fleet import PEER_GIB, policy_of, shared_config, with_peers
from rootgraft.fleet.replica_launcher import ProcessLauncher
from rootgraft.fleet.scaling.autoscaling import AutoscalePolicy


def test_replicas_share_cores_and_memory() -> None:
    shared = shared_config(EngineConfig(), 4, 8)
    assert (shared.threads, shared.gpu_memory_utilization) == (2, pytest.approx(0.225))
    assert shared_config(EngineConfig(), 4, 2).threads == 1
    assert shared_config(EngineConfig(gpu_memory_utilization=0.05), 16, 2).gpu_memory_utilization == 0.05


def test_threads_and_kv_memory_that_are_named_are_those_of_each_replica() -> None:
    shared = shared_config(EngineConfig(threads=3, kv_cache_memory=0.25), 4, 8)
    assert (shared.threads, shared.kv_cache_memory) == (3, 0.25)


def test_ranks_of_replicas_share_cores_and_copy_kv() -> None:
    config = EngineConfig(tensor_parallel_size=2)
    assert [shared_config(config, 2, cores).threads for cores in (8, 2)] == [2, 1]
    assert with_peers(config, ServerConfig(replicas=2).fleet_options).kv_peer_gib == PEER_GIB


@pytest.mark.parametrize(("count", "kind"), [(1, EngineClient), (2, Fleet), (16, Fleet)])
def test_a_fleet_serves_from_two_replicas_on(count: int, kind: type) -> None:
    assert type(engine_of(EngineConfig(), Path("m"), ServerConfig(replicas=count))) is kind


class FakeTemplate:
    """Counts how often it is started and closed."""

    def __init__(self) -> None:
        self.starts, self.closes = 0, 0

    async def start(self) -> None:
        self.starts += 1

    def close(self) -> None:
        self.closes += 1


@pytest.mark.parametrize(("keeps", "closes"), [(True, 0), (False, 1)])
async def test_a_fleet_that_may_have_no_replica_holds_no_weights_then(keeps: bool, closes: int) -> None:
    template = FakeTemplate()
    launcher = ProcessLauncher(CoreClient, template, keeps_template=keeps)  # type: ignore[arg-type]
    (one, _), (other, _) = await launcher.launch(), await launcher.launch()
    await launcher.stop(one)
    assert (template.starts, template.closes) == (2, 0)
    await launcher.stop(other)
    assert template.closes == closes
    await launcher.close()
    assert template.closes == closes + 1


@pytest.mark.parametrize(("bounds", "keeps"), [("0:2", False), ("1:2", True)])
def test_only_a_fleet_that_may_have_none_gives_its_weights_up(bounds: str, keeps: bool) -> None:
    fleet = engine_of(EngineConfig(), Path("m"), ServerConfig(autoscale=bounds))
    assert isinstance(fleet, Fleet) and isinstance(fleet._launcher, ProcessLauncher)
    assert fleet._launcher._keeps_template is keeps


def test_of_several_models_each_has_a_fleet() -> None:
    assert type(engine_of(EngineConfig(), Path("m"), ServerConfig(), 2)) is Fleet


@pytest.mark.parametrize(
    ("text", "bounds"), [("0:1", (0, 1)), ("1:1", (1, 1)), ("1:8", (1, 8)), ("16:16", (16, 16)), ("03:04", (3, 4))]
)
def test_bounds_of_autoscaling(text: str, bounds: tuple[int, int]) -> None:
    options = ServerConfig(autoscale=text)
    assert (options.autoscale_bounds, options.most_replicas, options.silence_seconds) == (bounds, bounds[1], 3.0)
    fleet = engine_of(EngineConfig(max_num_seqs=9), Path("m"), options)
    assert isinstance(fleet, Fleet)
    assert (fleet.status().bounds, fleet.status().wanted) == (bounds, max(1, bounds[0]))
    assert policy_of(EngineConfig(max_num_seqs=9), options.fleet_options) == AutoscalePolicy(*bounds, rows=4)


@pytest.mark.parametrize(
    "text", ["", "1", "4:1", "0:0", "1:17", "-1:4", "1:4:8", "1:x", "1: 4", "1.5:2", ":", "1:9999", "٠:١"]
)
def test_what_is_no_bounds_of_autoscaling(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--autoscale must be MIN:MAX such as 1:4, .* not "):
        ServerConfig(autoscale=text)


def test_a_model_that_is_kept_for_a_while_is_one_replica_or_none() -> None:
    options = ServerConfig(keep_alive=300.0)
    assert (options.is_fleet, options.autoscale_bounds) == (True, (0, 1))
    policy = policy_of(EngineConfig(max_num_seqs=9), options.fleet_options)
    assert policy == AutoscalePolicy(0, 1, rows=4, idle_seconds=300.0)
    several = ServerConfig(keep_alive=300.0, autoscale="0:3").fleet_options
    assert several.autoscale_bounds == (0, 3) and several.idle_seconds == 300.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"autoscale": "1:3"}, "--keep-alive stops the last replica: --autoscale 1:3 must be 0:MAX"),
        ({"replicas": 2}, "--keep-alive already sets the number of replicas: remove --replicas 2"),
        ({"replica_roles": "1p+1d"}, "remove --keep-alive 300"),
        ({"ray_address": "local"}, "--keep-alive starts replicas on this machine only: remove --ray-address"),
    ],
)
def test_what_does_not_go_with_a_model_that_is_kept_for_a_while(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(keep_alive=300.0, **options)


@pytest.mark.parametrize("seconds", [0.9, 30 * 86400 + 1, float("nan")])
def test_limits_of_the_time_that_a_model_is_kept(seconds: float) -> None:
    with pytest.raises(ConfigError, match="--keep-alive"):
        ServerConfig(keep_alive=seconds)
    assert ServerConfig(keep_alive=1.0).keep_alive == 1.0 and ServerConfig(keep_alive=30 * 86400.0).keep_alive


def test_the_number_of_replicas_is_said_once() -> None:
    with pytest.raises(ConfigError, match="--autoscale 1:4 already sets the number of replicas: remove --replicas 2"):
        ServerConfig(autoscale="1:4", replicas=2)
    with pytest.raises(ConfigError, match="remove --ray-address"):
        ServerConfig(autoscale="1:4", ray_address="local")


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("1p+1d", ("prefill", "decode")),
        ("2d+1p", ("decode", "decode", "prefill")),
        ("1p+1b", ("prefill", "both")),
        ("1b", ("both",)),
        ("8p+8d", ("prefill",) * 8 + ("decode",) * 8),
    ],
)
def test_roles_of_replicas(text: str, roles: tuple[str, ...]) -> None:
    options = ServerConfig(replica_roles=text)
    assert options.fleet_options.roles == roles and options.most_replicas == len(roles)
    assert type(engine_of(EngineConfig(), Path("m"), options)) is Fleet


@pytest.mark.parametrize(
    "text", ["", "1p", "2d", "1p+", "p+d", "0p+1d", "1p+1d+1x", "8p+9d", "1p 1d", "1P+1D", "٠p+1b"]
)
def test_what_is_no_roles_of_replicas(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--replica-roles must be .* such as 1p\+1d, .* not "):
        ServerConfig(replica_roles=text)


@pytest.mark.parametrize("options", [{"replicas": 2}, {"autoscale": "1:2"}], ids=str)
def test_roles_say_how_many_replicas_there_are(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--replica-roles 1p\+1d already sets the number of replicas: remove --"):
        ServerConfig(replica_roles="1p+1d", **options)


def test_replicas_copy_kv_where_there_are_several() -> None:
    one, two = ServerConfig().fleet_options, ServerConfig(replicas=2).fleet_options
    assert with_peers(EngineConfig(), one).kv_peer_gib is None
    assert with_peers(EngineConfig(), two).kv_peer_gib == PEER_GIB
    assert with_peers(EngineConfig(), ServerConfig(autoscale="1:2").fleet_options).kv_peer_gib == PEER_GIB
    assert with_peers(EngineConfig(kv_peer_gib=0), two).kv_peer_gib == 0
    with pytest.raises(ConfigError, match="--kv-events-config is an option of one engine"):
        with_peers(EngineConfig(kv_events_config="{}"), two)
    with pytest.raises(ConfigError, match="kv-peer-gib"):
        EngineConfig(kv_peer_gib=-1)


@pytest.mark.parametrize("count", [0, 17])
def test_bounds_of_replicas(count: int) -> None:
    with pytest.raises(ConfigError, match="--replicas"):
        ServerConfig(replicas=count)


def test_a_server_of_one_engine_imports_no_fleet() -> None:
    code = (
        "import sys; from pathlib import Path; from rootgraft.api.http import model_service;"
        "from rootgraft.api.config import ServerConfig; from rootgraft.engine.config import EngineConfig;"
        "model_service.engine_of(EngineConfig(), Path('m'), ServerConfig());"
        "names = [name.removeprefix('rootgraft.') for name in sys.modules];"
        "few = ('fleet', 'fleet.errors', 'fleet.fleet_options');"
        "print([n for n in names if n.split('.')[0] in ('ray', 'fleet') and n not in few and '.catalog' not in n])"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
