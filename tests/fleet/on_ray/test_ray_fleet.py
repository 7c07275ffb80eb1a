"""A fleet on a real local Ray, in a network namespace of its own: no stream is lost, and nothing is left behind."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.machine.waits import HANG_SECONDS

TESTS = Path(__file__).parents[2]

pytestmark = pytest.mark.heavy


def play(model: Path, working_directory: Path, strikes: str) -> Any:
    """Return what ``ray_scene`` says became of streams."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:  # any folder of that name would be found, without an origin
        pytest.skip("ray is not installed: pip install '.[fleet]'")
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-n", "true"], capture_output=True).returncode:
        pytest.skip("unshare -n is not permitted, and Ray in tests gets a network of its own")
    # A module that would shadow one of the standard library's, if the working directory were searched.
    (working_directory / "psutil.py").write_text("raise SystemExit('code of the working directory was run')\n")
    module = "runpy.run_module('support.api.ray_scene', run_name='__main__', alter_sys=True)"
    code = f"import runpy, sys; sys.path.insert(0, {str(TESTS)!r}); {module}"
    command = [unshare, "-n", sys.executable, "-P", "-c", code, str(model), strikes]
    ended = subprocess.run(command, cwd=working_directory, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert ended.returncode == 0, ended.stderr[-3000:]
    *printed, result = ended.stdout.splitlines()
    return json.loads(result) | {"printed": "\n".join([ended.stderr, *printed])}


@pytest.fixture(scope="module")
def facts(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return play(tiny_llama, tmp_path_factory.mktemp("working_directory"), "local")


def test_no_stream_is_lost(facts: Any) -> None:
    assert facts["equal"] and facts["ends"] == ["LENGTH"] and facts["lengths"] == [400]
    assert facts["lost"] == 3 and facts["replays"] >= 1


def test_ray_listens_on_loopback_alone_and_leaves_nothing(facts: Any) -> None:
    assert facts["listening"] == [] and facts["left"] == []


def test_the_terminal_is_quiet(facts: Any) -> None:
    assert "ray" not in facts["printed"].lower() and "sigterm" not in facts["printed"].lower()


def test_no_stream_is_lost_with_a_machine(tiny_llama: Path, tmp_path: Path) -> None:
    facts = play(tiny_llama, tmp_path, "machines")
    assert facts["equal"] and facts["ends"] == ["LENGTH"] and facts["lengths"] == [400]
    assert facts["lost"] == 1 and facts["replays"] >= 1 and facts["left"] == []
    assert "All 2 ranks of a replica must run on one machine" in facts["refusal"]


def test_fleets_of_two_models_share_one_ray(tiny_llama: Path, tmp_path: Path) -> None:
    """One of two ranks, which goes on when the other fleet has ended."""
    facts = play(tiny_llama, tmp_path, "models")
    assert facts["equal"] and facts["lost"] == 0 and facts["left"] == []


def test_a_replica_of_two_ranks_is_lost_drained_and_added_as_one(tiny_llama: Path, tmp_path: Path) -> None:
    """A killed follower: its replica's streams go on in the other one."""
    facts = play(tiny_llama, tmp_path, "ranks")
    assert facts["ranks"] == [2, 2] and facts["lost"] == 1 and facts["replays"] >= 1
    assert facts["equal"] and facts["ends"] == ["LENGTH"] and facts["left"] == []


def test_each_replica_of_a_local_ray_sees_its_own_gpus(tiny_llama: Path, tmp_path: Path) -> None:
    assert play(tiny_llama, tmp_path, "gpus")["seen"] == [["4", "5"], ["6", "7"]]
