"""A process whose event loop hangs ends with code 70, in Python's code and in native code that holds the lock."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.machine.waits import HANG_SECONDS

from rootgraft.api.http.loop_watch import Silence

PROGRAM = """
import asyncio, logging, os, re, sys, threading, time
from rootgraft.api.http import loop_watch
os.cpu_count = lambda: 1
loop_watch.SILENT_SECONDS, loop_watch.PROCESSOR_SECONDS = float(sys.argv[2]), float(sys.argv[3])
loop_watch._BEAT_SECONDS, loop_watch._ENDING_SECONDS = 0.05, 0.5
logging.basicConfig()

async def main():
    watch = loop_watch.LoopWatch(lambda: print("ending", logging.warning("ending") or "", flush=True))
    [thread] = [each for each in threading.enumerate() if each.name == "loop-watch"]
    print("begun", flush=True)
    exec(sys.argv[1])
    while watch._num_beats < 4:
        await asyncio.sleep(0.01)
    watch.close()
    thread.join()
    print("watched by", watch._timer._timer, flush=True)

asyncio.run(main())
"""
NEVER = "1000"


def start(blocks: str, silent: str, processor: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", PROGRAM, blocks, silent, processor]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("blocks", ["while True: pass", "time.sleep(1000)"])
def test_a_loop_that_hangs_is_ended_by_a_thread_which_says_where(blocks: str) -> None:
    process = start(blocks, "1", NEVER)
    out, error = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, out) == (70, "begun\nending \n")
    assert "The event loop has hung for 1 s: ending the process. Its stack:" in error
    assert "in main" in error


def test_a_loop_that_writes_to_a_log_that_nobody_reads_is_ended() -> None:
    """It holds the locks of the log and of the stream, which its end wants to write to."""
    process = start("while True: logging.warning('x' * 100_000)", "1", NEVER)
    assert process.wait(HANG_SECONDS) == 70
    process.communicate()


def test_native_code_that_holds_the_lock_is_ended_by_the_kernels_timer() -> None:
    process = start("re.match('(a+)+x', 'a' * 60)", "1", "2")
    out, _ = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, out) == (70, "begun\n")


def test_a_loop_that_lives_is_left_alone_and_one_that_has_ended_is_watched_no_more() -> None:
    process = start("pass", NEVER, NEVER)
    assert process.communicate(timeout=HANG_SECONDS) == ("begun\nwatched by None\n", "") and process.returncode == 0


def test_seconds_of_silence_are_counted_from_the_last_sign_of_life() -> None:
    silence = Silence(100.0)
    assert [silence.look(1, now) for now in (100.25, 100.5, 101.0)] == [0.0, 0.25, 0.75]
    assert silence.look(2, 101.25) == 0.0 and silence.look(2, 101.5) == 0.25


@pytest.mark.parametrize("absent", [2.5, 3600.0, 1e9])
def test_time_in_which_the_process_was_stopped_does_not_count(absent: float) -> None:
    silence = Silence(0.0)
    silence.look(1, 0.25)
    assert silence.look(1, 0.25 + absent) <= 0.5
    assert silence.look(2, 0.5 + absent) == 0.0


@pytest.mark.parametrize("is_asked", [True, False])
def test_systemd_hears_each_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_asked: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(HANG_SECONDS)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        if is_asked:
            monkeypatch.setenv("WATCHDOG_USEC", "60000000")
        process = start("pass", NEVER, NEVER)
        process.communicate(timeout=HANG_SECONDS)
        systemd.settimeout(0 if not is_asked else HANG_SECONDS)
        if is_asked:
            assert [systemd.recv(64) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        else:
            with pytest.raises(BlockingIOError):
                systemd.recv(64)
