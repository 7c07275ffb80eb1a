"""The engine in its own process: start, answers, abort, refusal, death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from array import array

import pytest
import uvloop
from support.machine.waits import until

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core import engine_process
from rootgraft.engine.errors import ConfigError, EngineDead, ModelError
from rootgraft.engine.ipc import Channel, frame
from rootgraft.engine.messages import AdapterChanged, Done, Failed, Heartbeat, Submit, TokenOut, encode
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.engine.serving.watchdog import HEARTBEAT_TIMEOUT
from rootgraft.engine.types import FinishReason, SamplingParams

CONFIG = EngineConfig(dtype="float32", device="cpu", num_gpu_blocks_override=40, threads=1, max_num_seqs=8)


class Listener:
    """Messages by sequence, and a way to wait for an end."""

    def __init__(self, client: EngineClient) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, asyncio.Future[Done | Failed]] = {}
        self.death: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()
        client.on_frame = self._frame
        client.on_death = self.death.set_result

    def end(self, number: int) -> asyncio.Future[Done | Failed]:
        return self.ends.setdefault(number, asyncio.get_running_loop().create_future())

    def _frame(self, messages) -> None:
        for message in messages:
            if isinstance(message, TokenOut):
                self.tokens.setdefault(message.id, []).extend(message.tokens)
            else:
                self.end(message.id).set_result(message)


def submit(number: int, **params) -> Submit:
    return Submit(number, array("i", [1, 2, 3]), SamplingParams(**{"temperature": 0.0, **params}))


async def test_answers_aborts_and_leaves(tiny_llama):
    client = EngineClient(CONFIG, tiny_llama)
    listener = Listener(client)
    ready = await client.start()
    assert (ready.vocab_size, ready.num_pages, ready.page_size) == (97, 40, 16)
    client.submit([submit(1, max_tokens=5), submit(2, max_tokens=400), submit(3, max_tokens=5)])
    assert (await listener.end(1)).reason is FinishReason.LENGTH
    client.abort([2])
    assert (await listener.end(2)).reason is FinishReason.ABORT
    await listener.end(3)
    assert listener.tokens[1] == listener.tokens[3] == listener.tokens[2][:5]
    await until(lambda: client.stats.get("steps", 0) >= 5)  # the heartbeat that follows
    assert client.stats["pages_private"] == 0 and client.stats["finished_abort"] == 1
    await client.close()
    assert client.process.returncode == 0 and not listener.death.done()


async def test_a_heartbeat_is_taken_after_the_messages_of_its_frame(tiny_llama):
    client = EngineClient(CONFIG, tiny_llama)
    await client.start()
    taken: list[str] = []
    client.on_frame = lambda messages: taken.extend(type(message).__name__ for message in messages)
    client.on_heartbeat = lambda heartbeat: taken.append(f"{type(heartbeat).__name__} {heartbeat.stats['steps']:g}")
    client.data_received(frame(encode([TokenOut(7, (1,)), AdapterChanged("none", None), Heartbeat({"steps": 3}, {})])))
    assert taken == ["TokenOut", "AdapterChanged", "Heartbeat 3"] and client.stats == {"steps": 3}
    await client.close()


async def test_an_unknown_adapter_is_refused(tiny_llama):
    client = EngineClient(CONFIG, tiny_llama)
    listener = Listener(client)
    await client.start()
    client.submit([Submit(1, array("i", [1]), SamplingParams(), adapter="nobody")])
    failed = await listener.end(1)
    assert isinstance(failed, Failed) and failed.kind == "UnknownModel" and "nobody" in failed.message
    await client.close()


async def test_the_death_of_the_engine_is_told_at_once(tiny_llama):
    client = EngineClient(CONFIG, tiny_llama)
    listener = Listener(client)
    await client.start()
    os.kill(client.process.pid, signal.SIGKILL)
    assert isinstance(await listener.death, EngineDead)
    assert not client.is_alive
    with pytest.raises(EngineDead):
        client.submit([submit(1)])
    await client.close()


async def test_an_engine_that_hangs_is_ended_without_being_asked(tiny_llama):
    client = EngineClient(CONFIG, tiny_llama)
    listener = Listener(client)
    await client.start()
    os.kill(client.process.pid, signal.SIGSTOP)
    client.kill()
    assert isinstance(await listener.death, EngineDead)
    await client.close()
    assert client.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_model_len": 5000}, ConfigError, "512"),
        ({"num_gpu_blocks_override": 2, "block_size": 1}, ConfigError, "KV pool"),
    ],
)
async def test_what_is_wrong_at_the_start_is_said(tiny_llama, options, error, text):
    client = EngineClient(EngineConfig(dtype="float32", device="cpu", **options), tiny_llama)
    with pytest.raises(error, match=text):
        await client.start()
    await client.close()


async def test_a_folder_that_is_no_model_is_refused(tmp_path):
    client = EngineClient(EngineConfig(device="cpu"), tmp_path)
    with pytest.raises(ModelError):
        await client.start()
    await client.close()


@pytest.mark.parametrize("num_passes", [0, 1, 2, 3, 20])
def test_a_start_that_is_cancelled_ends_at_once(num_passes, tiny_llama):
    """At any pass of the server's own event loop: the process is killed while it loads, and its socket closed."""

    async def cancel_and_close() -> None:
        client = EngineClient(CONFIG, tiny_llama)
        starting = asyncio.create_task(client.start())
        for _ in range(num_passes):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await client.close()
        assert not client.is_alive
        assert client.process is None or client.process.returncode == -signal.SIGKILL

    uvloop.run(cancel_and_close())


async def test_an_engine_that_hangs_is_found(tiny_llama):
    """Stopped, it is found by its silence, and all that waits for it fails; what comes later changes nothing."""
    client = EngineClient(CONFIG, tiny_llama, heartbeat_timeout=1.5)
    listener = Listener(client)
    await client.start()
    client.submit([submit(1, max_tokens=400, ignore_eos=True)])
    await until(lambda: 1 in listener.tokens)
    os.kill(client.process.pid, signal.SIGSTOP)
    with pytest.raises(EngineDead, match=r"hangs.*no sign of life.*1\.5 seconds"):
        await client.list_adapters()
    assert "--heartbeat-timeout" in str(await listener.death)
    assert not client.is_alive and client.silent_seconds > 1
    with pytest.raises(EngineDead, match="hangs"):
        client.submit([submit(2)])
    os.kill(client.process.pid, signal.SIGCONT)
    await client.close()
    assert client.process.returncode == -signal.SIGKILL


ENDS_BUT_FOR_A_THREAD = """
import ctypes, os, sys, threading, time
from rootgraft.engine.ipc import frame
from rootgraft.engine.messages import Ready, encode
threading.Thread(target=time.sleep, args=(600,)).start()
os.write(int(sys.argv[1]), frame(encode([Ready(64, 97, 40, 16, ())])))
ctypes.CDLL(None).pthread_exit(None)
"""


async def test_the_end_of_an_engine_is_found_while_one_of_its_threads_keeps_its_socket_open(tiny_llama):
    """As after a kill, where a thread of low priority waits for its turn to end."""

    def spawn(fd: int, liveness: int, model_path: str, options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-c", ENDS_BUT_FOR_A_THREAD, str(fd)]
        return subprocess.Popen(command, pass_fds=(fd, liveness))

    client = EngineClient(CONFIG, tiny_llama, heartbeat_timeout=60.0, spawn=spawn)
    listener = Listener(client)
    await client.start()
    assert str(await listener.death) == "The engine process has ended."
    await client.close()


async def test_a_step_without_end_is_found(tiny_llama, monkeypatch):
    client = EngineClient(CONFIG, tiny_llama, watchdog_timeout=1.0)
    listener = Listener(client)
    watchdog = client._process.watch.watchdog
    monkeypatch.setattr(watchdog, "sign_of_life", lambda passes, take=watchdog.sign_of_life: take(7))
    await client.start()
    assert "--watchdog-timeout" in str(await listener.death) and client.silent_seconds < HEARTBEAT_TIMEOUT
    await client.close()


async def test_a_stopped_client_does_not_count_its_own_absence(tiny_llama, monkeypatch):
    """For its clock, its loop has stood still for longer than the engine may be silent, and the engine with it."""
    client = EngineClient(CONFIG, tiny_llama)
    listener = Listener(client)
    watchdog = client._process.watch.watchdog
    absence, ticks = 0.0, []

    def tick(now: float, tick=watchdog.tick) -> str | None:
        ticks.append(now + absence)
        return tick(ticks[-1])

    monkeypatch.setattr(watchdog, "tick", tick)
    await client.start()
    await until(lambda: bool(ticks))
    os.kill(client.process.pid, signal.SIGSTOP)
    before, absence = ticks[-1], 20 * HEARTBEAT_TIMEOUT
    await until(lambda: ticks[-1] > before + HEARTBEAT_TIMEOUT)
    os.kill(client.process.pid, signal.SIGCONT)
    client.submit([submit(1, max_tokens=5)])
    assert (await listener.end(1)).reason is FinishReason.LENGTH
    assert client.is_alive and not listener.death.done()
    await client.close()
    assert client.process.returncode == 0


@pytest.mark.parametrize("given", [{}, {"PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "b:2"}])
def test_segments_of_gpu_memory_grow_unless_the_user_says_otherwise(given: dict[str, str]) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    program = (
        "import json, os\nfrom rootgraft.engine.core.engine_process import set_up_process\nset_up_process()\n"
        f"print(json.dumps({{name: os.environ[name] for name in {names} if name in os.environ}}))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == (given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_a_start_without_a_thread_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a limit on the address space, where not even the thread of the signs of life begins."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    client, server = socket.socketpair()
    reader, writer = os.pipe()
    with client, server:
        channel = Channel(server)
        assert engine_process.start_liveness(writer, channel) is None
        assert b"The system refuses the engine a thread" in client.recv(65536)
    os.close(reader)
    os.close(writer)
