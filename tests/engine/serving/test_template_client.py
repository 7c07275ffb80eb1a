"""Engine processes that are forked from one with the weights: the same engine, whatever becomes of either."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.engine.greedy_answers import tokens_of
from support.machine.waits import until

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import EngineDead
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.engine.serving.fork_server import ForkedProcess
from rootgraft.engine.serving.template_client import EngineTemplate
from rootgraft.engine.types import SamplingParams

CONFIG = EngineConfig(dtype="float32", device="cpu", num_gpu_blocks_override=40, threads=2, max_num_seqs=8)
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=20)


async def buried(pid: int) -> None:
    """Wait until a process that has ended is none any more: its parent, or the system's first process, takes note of it
    when it comes to that."""
    await until(lambda: not psutil.pid_exists(pid))


async def test_forked_engines_are_engines(tiny_llama: Path) -> None:
    """One process of each kind, as each imports torch: forked ones share what the template has."""
    template = EngineTemplate(CONFIG, tiny_llama)
    await template.start()
    clients = [EngineClient(CONFIG, tiny_llama, spawn=template.spawn) for _ in range(2)]
    plain = EngineClient(CONFIG, tiny_llama)
    readys = [await client.start() for client in (*clients, plain)]
    assert [type(client.process) is ForkedProcess for client in (*clients, plain)] == [True, True, False]
    assert len({(ready.base_digest, ready.num_pages, ready.max_model_len) for ready in readys}) == 1
    answers = [await tokens_of(client, PARAMS) for client in (*clients, plain)]
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 20

    one, other = clients
    deaths: list[EngineDead] = []
    one.on_death = deaths.append
    server = template._server
    assert one.process is not None and other.process is not None and server._process is not None
    pids = one.process.pid, other.process.pid
    os.kill(pids[0], signal.SIGSTOP)
    one.kill()
    await until(lambda: bool(deaths))
    await one.close()
    await buried(pids[0])

    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait()
    assert await tokens_of(other, PARAMS) == answers[0]
    third = EngineClient(CONFIG, tiny_llama, spawn=template.spawn)
    await asyncio.gather(third.start(), other.close(), plain.close())
    assert not isinstance(third.process, ForkedProcess) and await tokens_of(third, PARAMS) == answers[0]
    await buried(pids[1])
    await third.close()
    template.close()


async def test_a_model_that_cannot_be_loaded_is_told_by_the_engine(tmp_path: Path) -> None:
    template = EngineTemplate(CONFIG, tmp_path)
    await template.start()
    server = template._server
    assert server._process is None and server._socket is None
    assert not server._is_possible, "it is not tried again"


@pytest.mark.parametrize("changes", [{"device": "cuda"}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
async def test_no_process_is_forked_for_a_gpu_or_a_rank(changes: dict[str, Any], tmp_path: Path) -> None:
    template = EngineTemplate(replace(CONFIG, **changes), tmp_path)
    await template.start()
    assert template._server._process is None
    assert template._server._is_possible, "it was not even tried, which would have imported torch"
