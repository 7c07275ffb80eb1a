"""An engine process that imports the engine before anyone knows for what: the same engine, or soon no process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.engine.greedy_answers import tokens_of
from support.machine.waits import HANG_SECONDS

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.serving import engine_spawn
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.engine.serving.engine_spawn import EnginePreload
from rootgraft.engine.types import SamplingParams

CONFIG = EngineConfig(dtype="float32", device="cpu", num_gpu_blocks_override=40, threads=1, max_num_seqs=8)


def process_of(preload: EnginePreload) -> subprocess.Popen[bytes]:
    assert preload._process is not None
    return preload._process


async def test_a_preloaded_engine_is_an_engine(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EnginePreload() as preload:
        process = process_of(preload)
        client = EngineClient(CONFIG, tiny_llama, spawn=preload.spawn)
        assert (await client.start()).num_pages == 40
        assert client.process is process
        assert len(await tokens_of(client, SamplingParams(temperature=0.0, max_tokens=5))) == 5
        assert os.readlink(f"/proc/{process.pid}/fd/0") == os.devnull
        monkeypatch.setattr(engine_spawn, "spawn_engine", lambda *arguments: arguments)
        assert preload.spawn(3, 4, "path", "{}") == (3, 4, "path", "{}"), "one is for one engine"
        await client.close()
    assert process.returncode == 0


def test_one_that_nobody_needed_is_ended() -> None:
    with EnginePreload() as preload:
        process = process_of(preload)
    assert process.returncode == -signal.SIGKILL


def test_one_that_has_ended_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_spawn, "spawn_engine", lambda *arguments: arguments)
    with EnginePreload() as preload:
        process = process_of(preload)
        process.kill()
        process.wait()
        assert preload.spawn(1, 2, "path", "{}") == (1, 2, "path", "{}")
    with EnginePreload() as preload:  # options that no message holds
        process = process_of(preload)
        assert preload.spawn(1, 2, "path", "-" * (1 << 24))[2:3] == ("path",)
        assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("program", ["raise ImportError('libtorch.so: not found')", "import os; os._exit(3)"])
def test_it_leaves_in_silence_when_its_client_does(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where torch cannot be imported: an engine that starts says so, and this one does not start."""
    (tmp_path / "torch.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    command = [sys.executable, "-P", "-m", "rootgraft.engine.core.engine_process", str(os.getpid())]
    with theirs:
        done = subprocess.run(command, stdin=theirs, capture_output=True, check=False, timeout=HANG_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (3 if "_exit" in program else 0, b"", b"")


def test_ctrl_c_is_not_for_an_engine_that_starts() -> None:
    """Not even before it says so to the system: until then it is held back."""

    def has(field: str) -> bool:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return bool(int(status.partition(f"{field}:")[2].split()[0], 16) >> (signal.SIGINT - 1) & 1)

    with EnginePreload() as preload:
        process = process_of(preload)
        while not has("SigIgn"):
            process.send_signal(signal.SIGINT)
            assert process.poll() is None
        while has("SigBlk"):
            assert process.poll() is None
