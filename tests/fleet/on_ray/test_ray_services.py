"""Ray on a busy machine: its node is waited for, and its raylet waits for no port of an agent."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rootgraft.fleet.on_ray import ray_services


def test_a_node_of_a_busy_machine_is_waited_for() -> None:
    """Ray's own look-up fails until the node is there; what is looked up later is not waited for twice over."""
    answers = iter([RuntimeError("not yet"), RuntimeError("not yet"), {"node": 1}])

    def get_node(address: str, node: str) -> object:
        assert (address, node) == ("address", "node")
        if isinstance(found := next(answers), Exception):
            raise found
        return found

    patient = ray_services.until_there(get_node)
    assert patient("address", "node") == {"node": 1} and ray_services.until_there(patient) is patient

    def missing() -> object:
        raise RuntimeError("never")

    with pytest.raises(RuntimeError, match="never"):
        ray_services.until_there(missing, seconds=0.0)()


def test_a_raylet_finds_the_ports_that_it_would_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would abort after 15 seconds without them; the agent of runtime environments listens where it is told to."""
    written: dict[str, int] = {}

    def persist_port(folder: str, node: str, name: str, port: int) -> None:
        assert (folder, node) == ("session", "node")
        written[name] = port

    names = {f"{each}_PORT_NAME": each for each in ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN")}
    monkeypatch.setitem(sys.modules, "ray._raylet", SimpleNamespace(persist_port=persist_port, **names))

    def start_raylet(address: str, node_id: str, session_dir: str, *, runtime_env_agent_port: int | None = None) -> Any:
        assert len(written) == 3 and set(written.values()) == {-1}
        return address, runtime_env_agent_port

    start = ray_services.without_agent_ports(start_raylet)
    address, port = start("address", "node", session_dir="session", runtime_env_agent_port=0)
    assert address == "address" and 1024 <= port < 65536
    assert ray_services.without_agent_ports(start) is start
