"""A process whose event loop hangs ends with code 70, in Python's code and in native code that holds the lock."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WAIT = 60
PROGRAM = """
import asyncio, os, re, sys, time
from rootgraft.api.http import loop_watch
os.cpu_count = lambda: 1
loop_watch.SILENT_SECONDS, loop_watch.PROCESSOR_SECONDS = float(sys.argv[2]), float(sys.argv[3])
loop_watch._BEAT_SECONDS = 0.05

async def main():
    watch = loop_watch.LoopWatch(lambda: print("ending", flush=True))
    await asyncio.sleep(0.1)
    print("begun", flush=True)
    exec(sys.argv[1])
    await eval(sys.argv[4])
    watch.close()
    time.sleep(2)

asyncio.run(main())
"""
NEVER = "1000"


def start(blocks: str, silent: str, processor: str, awaited: str = "asyncio.sleep(0)") -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", PROGRAM, blocks, silent, processor, awaited]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("blocks", ["while True: pass", "time.sleep(1000)"])
def test_a_loop_that_hangs_is_ended_by_a_thread_which_says_where(blocks: str) -> None:
    process = start(blocks, "1", NEVER)
    out, error = process.communicate(timeout=WAIT)
    assert (process.returncode, out) == (70, "begun\nending\n")
    assert "The event loop gives no sign of life for 1 s: the process ends. It is at:" in error
    assert "in main" in error


def test_native_code_that_holds_the_lock_is_ended_by_the_kernels_timer() -> None:
    process = start("re.match('(a+)+x', 'a' * 60)", "1", "2")
    out, _ = process.communicate(timeout=WAIT)
    assert (process.returncode, out) == (70, "begun\n")


def test_a_loop_that_lives_and_one_that_has_ended_are_left_alone() -> None:
    process = start("pass", "2", "2", "asyncio.sleep(4)")
    assert process.communicate(timeout=WAIT) == ("begun\n", "") and process.returncode == 0


def test_a_process_that_was_stopped_does_not_hang() -> None:
    process = start("pass", "2", NEVER, "asyncio.sleep(5)")
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.5)
    os.kill(process.pid, signal.SIGCONT)
    process.communicate(timeout=WAIT)
    assert process.returncode == 0


@pytest.mark.parametrize("is_asked", [True, False])
def test_systemd_hears_each_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_asked: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(WAIT)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        if is_asked:
            monkeypatch.setenv("WATCHDOG_USEC", "60000000")
        process = start("pass", NEVER, NEVER, "asyncio.sleep(0.5)")
        process.communicate(timeout=WAIT)
        systemd.settimeout(0 if not is_asked else WAIT)
        if is_asked:
            assert [systemd.recv(64) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        else:
            with pytest.raises(BlockingIOError):
                systemd.recv(64)
