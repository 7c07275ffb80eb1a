"""Where the engine's threads run: on the cores of one socket, unless ``--threads`` says how many."""

from __future__ import annotations

import os

import pytest

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.executor.device import place_threads
from rootgraft.engine.machine import resources
from rootgraft.engine.machine.resources import Cores


@pytest.mark.parametrize(("option", "affinity", "threads"), [(None, 64, 16), (None, 16, 16), (40, 64, 40), (1, 16, 1)])
def test_the_engine_is_bound_to_a_socket_unless_threads_are_given(
    monkeypatch: pytest.MonkeyPatch, option: int | None, affinity: int, threads: int
) -> None:
    socket, bound = frozenset(range(16)), list[frozenset[int]]()
    monkeypatch.setattr(resources, "cores", lambda: Cores(64, 32, affinity, None, socket, 16))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, allowed: bound.append(allowed))
    assert place_threads(EngineConfig(threads=option)) == threads
    assert bound == ([socket] if affinity == 64 and option is None else [])
