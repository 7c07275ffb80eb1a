"""What is told of a fleet: over HTTP, in the terminal, in Prometheus; of one process too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.api.api_fakes import FakeClient
from support.api.api_live import Live, make_state, serve
from support.api.key_files import entry, write

from rootgraft.api.cli.main import main
from rootgraft.api.config import ServerConfig
from rootgraft.api.observe.engine_facts import EngineFacts
from rootgraft.api.observe.replica_view import GatewaysStatus, GatewayStatus
from rootgraft.engine.serving.replica_status import FleetStatus, ReplicaStatus

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
BUSY = {"running": 3.0, "waiting": 2.0, "waiting_deferred": 1.0, "pages": 100.0, "pages_available": 60.0}
COUNTED = {"prompt_tokens": 200.0, "prompt_tokens_cached": 150.0, "generation_tokens": 30.0}


def replica(name: str, engine: int, state: str = "serving", **stats: float) -> ReplicaStatus:
    return ReplicaStatus(name, engine, state, f"process {engine + 7}", 3725.0, 0.1, ("sql", "fr"), stats)


class FakeFleet(FakeClient):
    """Two replicas; the one with index 1 is new and has not said anything yet."""

    def __init__(self) -> None:
        super().__init__()
        self.stats = {**BUSY, **COUNTED}
        replicas = (replica("replica-1", 0, "draining", **BUSY, **COUNTED), replica("replica-3", 1))
        self.told = FleetStatus(replicas, 2, 1, 4, (0, 3), 3, 1, 7, 5, 2, 6)

    def status(self) -> FleetStatus:
        return self.told

    def engine_stats(self) -> Mapping[int, Mapping[str, float]]:
        return {0: self.stats, 1: {"prompt_tokens": 8.0}}


@pytest.fixture
def fleet() -> Iterator[Live]:
    yield from with_client(FakeFleet())


def with_client(
    client: Any, options: ServerConfig | None = None, gateways: GatewaysStatus | None = None
) -> Iterator[Live]:
    state = make_state(options)
    state.observers.gateways = None if gateways is None else lambda: gateways
    state.engine.client = client
    assert state.engine.async_engine is not None
    state.begin_serving(state.engine.async_engine, client, EngineFacts())
    yield from serve(state)


def test_replicas_over_http(fleet: Live) -> None:
    with fleet.http() as http:
        told = http.get("/v1/fleet").json()
        shown = http.get("/ui/state").json()["fleet"]
    first, second = told.pop("data")
    assert told == {
        "object": "fleet", "wanted": 2, "autoscale": {"min": 0, "max": 3}, "starting": 1, "held_requests": 4,
        "started": 3, "lost": 1, "replays": 7, "drained": 5, "scaled_up": 2, "scaled_down": 6,
    }  # fmt: skip
    assert first == {
        "id": "replica-1", "object": "replica", "engine": 0, "state": "draining", "role": "both",
        "place": "process 7", "up_seconds": 3725.0, "silent_seconds": 0.1, "running": 3, "waiting": 2,
        "kv_cache_usage": 0.4,
        "prompt_tokens": 200, "prompt_tokens_cached": 150, "prefix_cache_hit_rate": 0.75, "generation_tokens": 30,
        "adapters": ["sql", "fr"],
    }  # fmt: skip
    assert (second["prefix_cache_hit_rate"], second["running"], second["kv_cache_usage"]) == (None, 0, 0.0)
    assert shown == {**told, "data": [first, second]}


def test_one_process_is_a_fleet_of_one() -> None:
    for live in with_client(FakeClient()):
        with live.http() as http:
            told = http.get("/v1/fleet").json()
            assert [each["state"] for each in told["data"]] == ["serving"]
            assert (told["wanted"], told["lost"], told["autoscale"]) == (1, 0, None)
            assert http.get("/ui/state").json()["fleet"] is None
            live.client.is_alive = False
            assert http.get("/v1/fleet").json()["data"][0]["state"] == "lost"


def test_replicas_are_for_admins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "keys.json", entry("user"), entry("boss", scopes=["admin"]))
    for live in with_client(FakeFleet(), ServerConfig(api_key_file=str(tmp_path / "keys.json"))):
        for key, status in (("user", 403), ("boss", 200), ("nobody", 401)):
            with live.http(headers={"authorization": f"Bearer {key}"}) as http:
                assert http.get("/v1/fleet").status_code == status
        assert main(["fleet", "status", "--url", live.url, "--api-key", "boss"]) == 0
        assert main(["fleet", "status", "--url", live.url, "--api-key", "user"]) == 1
        said = capsys.readouterr()
        assert "replica-3" in said.out
        assert (
            said.err
            == "rootgraft fleet status: The server returned HTTP 403: This needs an API key with the scope 'admin'.\n"
        )


def test_the_table(fleet: Live, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "status", "--url", fleet.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "1 of 2 replicas serve (0 to 3 by load), 1 starting, 1 draining, 4 requests wait for one.",
        "Since the server's start: 3 started, 1 lost, 5 drained, 7 replays, scaled up 2, down 6.",
    ]
    assert lines[3].split() == [
        "replica-1", "draining", "3", "2", "40%", "75%", "1", "h", "2", "min", "process", "7", "sql,", "fr",
    ]  # fmt: skip
    assert lines[4].split()[:6] == ["replica-3", "serving", "0", "0", "0%", "-"]
    assert main(["fleet", "status", "--url", fleet.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["wanted"] == 2


def test_a_fleet_command_is_named_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet"]) == 2
    assert "unknown command 'fleet'. There is fleet status." in capsys.readouterr().err


def test_nobody_who_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "status", "--url", "http://127.0.0.1:9/v1"]) == 1
    assert "No server responds at http://127.0.0.1:9/v1" in capsys.readouterr().err


def metrics_of(live: Live) -> dict[str, Any]:
    with live.http() as http:
        text = http.get("/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_each_replica_has_its_series(fleet: Live) -> None:
    families = metrics_of(fleet)

    def values(name: str) -> dict[tuple[str, ...], float]:
        samples = families[f"rootgraft:{name}"].samples
        return {tuple(v for k, v in each.labels.items() if k != "model_name"): each.value for each in samples}

    assert values("prompt_tokens") == {("0",): 200.0, ("1",): 8.0}
    assert values("num_requests_running") == {("0",): 3.0}
    assert values("kv_cache_usage_perc") == {("0",): 0.4, ("1",): 0.0}
    assert values("num_requests_waiting_by_reason")["0", "capacity"] == 1.0
    assert values("engine_healthy") == {("0",): 1.0}
    assert values("replicas") == {("serving",): 1.0, ("starting",): 1.0, ("draining",): 1.0}
    assert values("replica_scalings") == {("up",): 2.0, ("down",): 6.0}
    assert (values("replays"), values("replica_losses")) == ({(): 7.0}, {(): 1.0})


def test_the_page_of_a_fleets_metrics_is_complete(fleet: Live) -> None:
    section = PAGE.read_text().partition("\n## Of a fleet\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\S+?)` \| (\w+) \|([^|]*)\|", section, re.MULTILINE)
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    served = {}
    for family in metrics_of(fleet).values():
        if family.name.startswith(("rootgraft:replica", "rootgraft:requests_held", "rootgraft:replays")):
            labels = set().union(*(sample.labels for sample in family.samples)) - {"model_name"}
            served[family.name + ("_total" if family.type == "counter" else "")] = family.type, labels
    assert documented == served


def test_gateways_are_told_beside_the_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    gateways = (
        GatewayStatus("gateway-1", "serving", 11, 65.0, 0.254, 3),
        GatewayStatus("gateway-4", "starting", 12, 1.0, 0.0, 0),
    )
    for live in with_client(FakeFleet(), None, GatewaysStatus(gateways, 4, 2)):
        with live.http() as http:
            told = http.get("/v1/fleet").json()["gateways"]
        assert (told["started"], told["lost"], len(told["data"])) == (4, 2, 2)
        assert told["data"][0] == {
            "id": "gateway-1", "object": "gateway", "state": "serving", "place": "process 11", "up_seconds": 65.0,
            "silent_seconds": 0.25, "active": 3,
        }  # fmt: skip
        assert main(["fleet", "status", "--url", live.url]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-4] == "Gateways since the server's start: 4 started, 2 lost."
        assert lines[-2].split() == ["gateway-1", "serving", "3", "1", "min", "5", "s", "process", "11"]
        families = metrics_of(live)
        values = {tuple(sample.labels.values()): sample.value for sample in families["rootgraft:gateways"].samples}
        assert values == {("serving",): 1.0, ("starting",): 1.0, ("draining",): 0.0}
        section = PAGE.read_text().partition("\n## Of gateways\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| `(\S+?)` \| (\w+) \|([^|]*)\|", section, re.MULTILINE)
        documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
        served = {
            family.name + ("_total" if family.type == "counter" else ""): (
                family.type,
                set().union(*(sample.labels for sample in family.samples)),
            )
            for family in families.values()
            if family.name.startswith("rootgraft:gateway")
        }
        assert documented == served
